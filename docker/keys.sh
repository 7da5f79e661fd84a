#!/usr/bin/env bash
# Makes what a federation over TLS with authentication needs: a CA, the server's certificate, one key pair a device.
#
#   docker/keys.sh server DIR HOST...   DIR/ca.key, DIR/ca.crt, DIR/server.key, DIR/server.crt
#   docker/keys.sh client DIR NAME...   DIR/clients/NAME, DIR/clients/NAME.pub
#
# HOST: every name or address by which devices or Docker services will reach the server (localhost, 127.0.0.1 and ::1
# are added). Needs openssl and ssh-keygen. Overwrites nothing. DAYS sets how long the server's certificate is valid
# (default 825), CA_DAYS the CA's (default 3650).
set -euo pipefail
umask 077

fail() {
  echo "error: $*" >&2
  exit 2
}

usage() {
  sed -n '2,9s/^# \{0,1\}//p' "$0"
  exit "$1"
}

needs() {
  command -v "$1" >/dev/null || fail "$1 is not installed; install the package that has it ($2)"
}

make_ca() {
  openssl ecparam -genkey -noout -name secp384r1 -out "$1/ca.key"
  openssl req -x509 -new -key "$1/ca.key" -sha384 -days "${CA_DAYS:-3650}" -out "$1/ca.crt" \
    -subj "/O=fedtta/CN=fedtta CA" \
    -addext "basicConstraints=critical,CA:TRUE,pathlen:0" -addext "keyUsage=critical,keyCertSign,cRLSign"
}

make_server() {
  local dir=$1 host name names=DNS:localhost,IP:127.0.0.1,IP:::1 scratch
  shift
  for host in "$@"; do
    if [[ $host =~ ^[0-9]+(\.[0-9]+){3}$ || $host =~ ^[0-9A-Fa-f]*:[0-9A-Fa-f:]*:[0-9A-Fa-f]*$ ]]; then
      name=IP:$host
    elif [[ $host =~ ^(\*\.)?[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$ ]]; then
      name=DNS:$host
    else
      fail "$host: no host name and no IP address (give no port, no https://)"
    fi
    [[ ,$names, == *",$name,"* ]] || names+=,$name
  done
  for file in server.key server.crt; do
    [ ! -e "$dir/$file" ] || fail "$dir/$file is there already; to renew it, move server.key and server.crt away first"
  done
  [ -e "$dir/ca.key" ] || [ ! -e "$dir/ca.crt" ] ||
    fail "$dir/ca.crt is there without $dir/ca.key: bring the key here, or begin in another folder"
  scratch=$(mktemp -d)
  # shellcheck disable=SC2064  # the folder of now, not of then
  trap "rm -rf '$scratch'" EXIT
  if [ -e "$dir/ca.key" ]; then
    cp "$dir/ca.key" "$dir/ca.crt" "$scratch/"
  else
    make_ca "$scratch"
  fi
  openssl x509 -in "$scratch/ca.crt" -noout -checkend $((${DAYS:-825} * 86400)) >/dev/null ||
    fail "the CA ends before a certificate of ${DAYS:-825} days: set DAYS to fewer, or make a new CA (docs/deploy.md)"
  printf '%s\n' "subjectAltName=$names" "basicConstraints=critical,CA:FALSE" \
    "keyUsage=critical,digitalSignature" "extendedKeyUsage=serverAuth" >"$scratch/extensions"
  openssl ecparam -genkey -noout -name prime256v1 -out "$scratch/server.key"
  openssl req -new -key "$scratch/server.key" -out "$scratch/request" -subj "/O=fedtta/CN=fedtta server"
  openssl x509 -req -in "$scratch/request" -CA "$scratch/ca.crt" -CAkey "$scratch/ca.key" -sha384 -days "${DAYS:-825}" \
    -set_serial "0x$(openssl rand -hex 16)" -extfile "$scratch/extensions" -out "$scratch/server.crt" 2>/dev/null ||
    fail "no certificate could be made for $*"
  chmod 644 "$scratch/server.crt" "$scratch/ca.crt"
  mkdir -p "$dir"
  [ -e "$dir/ca.key" ] || mv "$scratch/ca.key" "$scratch/ca.crt" "$dir/"
  mv "$scratch/server.key" "$scratch/server.crt" "$dir/"
  cat <<END
$dir/ca.key      the CA's private key: whoever has it can pose as the server. Take it off the server, keep it safe;
                 it is needed again only to renew the server's certificate
$dir/ca.crt      public: copy it to every device, and to wherever runs are started from
$dir/server.key  the server's private key: on the server only
$dir/server.crt  public: on the server. Valid for ${names//,/, } until $(openssl x509 -in "$dir/server.crt" -noout -enddate | cut -d= -f2)
next:            docker/keys.sh client $dir NAME...      then, on the server:  fedtta serve --certificates $dir
END
}

make_clients() {
  local dir=$1 name
  shift
  for name in "$@"; do
    [[ $name =~ ^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$ && $name != *.pub ]] ||
      fail "$name: allowed in a name: letters, digits, '.', '_' and '-' (and not .pub at its end)"
    [ ! -e "$dir/clients/$name" ] && [ ! -e "$dir/clients/$name.pub" ] ||
      fail "$dir/clients/$name is there already; to replace it, revoke it (docs/deploy.md) and move it away first"
  done
  [ "$(printf '%s\n' "$@" | sort -u | wc -l)" -eq $# ] || fail "a name is given twice; name each once"
  mkdir -p "$dir/clients"
  for name in "$@"; do
    ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f "$dir/clients/$name"
    chmod 644 "$dir/clients/$name.pub"
    cat <<END
$dir/clients/$name      private: copy it, with ca.crt, to the device $name and nowhere else, then delete it here
$dir/clients/$name.pub  public: on the server,  fedtta register $dir/clients/$name.pub --name $name --ca $dir/ca.crt
END
  done
}

case ${1:-} in
server | client) [ $# -ge 3 ] || usage 2 ;;
-h | --help) usage 0 ;;
*) usage 2 ;;
esac
what=$1 folder=${2%/}
shift 2
if [ "$what" = server ]; then
  needs openssl openssl
  make_server "$folder" "$@"
else
  needs ssh-keygen openssh-client
  make_clients "$folder" "$@"
fi
