"""A local stand-in for the Dockerfile's base image, made of this machine's own Python: no registry, no download.

It holds the interpreter, a shell with a few tools, and of each package of this environment the metadata alone, so that
pip finds the dependencies satisfied. The packages themselves are mounted at `SITE` when a container runs: torch would
make every image gigabytes larger.
"""

import io
import os
import re
import shutil
import ssl
import stat
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path

SITE = "/site-packages"
TOOLS = ("sh", "cat", "chmod", "chown", "env", "id", "ls", "mkdir", "rm", "sleep", "tar", "touch")
#: what the packages' own libraries want beyond the interpreter's
LIBRARIES = (
    *("libstdc++.so.6", "libgcc_s.so.1", "libgomp.so.1"),
    *("libpthread.so.0", "libdl.so.2", "librt.so.1", "libutil.so.1"),
)
COMMANDS = re.compile(r"flwr.*|flower-.*")
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
PASSWD = "root:x:0:0:root:/root:/bin/sh\n"
#: what a build may download (the build backend) comes from where this machine's pip gets it
PIP_SETTINGS = ("index-url", "extra-index-url", "find-links", "trusted-host")


def site_packages() -> Path:
    """The folder of this environment's packages."""
    return Path(sysconfig.get_path("purelib"))


def write(stream: io.BufferedIOBase) -> None:
    """Write the image's root file system as a tar archive."""
    with tarfile.open(fileobj=stream, mode="w|") as tar:
        image = _Image(tar)
        image.interpreter()
        image.packages()
        image.tools()
        image.settings()


class _Image:
    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._there: set[str] = set()

    def interpreter(self) -> None:
        binary = Path(sys.base_prefix, "bin", VERSION)
        self._program(binary, f"/usr/local/bin/{VERSION}")
        for name in ("python", "python3"):
            self._link(f"/usr/local/bin/{name}", VERSION)
        library = Path(sysconfig.get_path("stdlib"))
        left_out = {"site-packages", "test", "tests", "idlelib", "tkinter", "ensurepip"}
        self._tree(library, f"/usr/local/lib/{VERSION}", left_out)
        for extension in (library / "lib-dynload").glob("*.so"):
            self._libraries(extension)
        for name in LIBRARIES:
            self._libraries_named(name)

    def packages(self) -> None:
        target = f"/usr/local/lib/{VERSION}/site-packages"
        self._bytes(f"{target}/mounted.pth", f"{SITE}\n".encode())
        source = site_packages()
        self._tree(source / "pip", f"{target}/pip", set())
        for metadata in source.glob("*.dist-info"):
            if not metadata.name.startswith("fedtta_flwr-"):
                self._tree(metadata, f"{target}/{metadata.name}", set())
        for script in Path(sys.prefix, "bin").iterdir():
            if COMMANDS.fullmatch(script.name):
                text = re.sub(r"^#!.*", "#!/usr/local/bin/python", script.read_text(), count=1)
                self._bytes(f"/usr/local/bin/{script.name}", text.encode(), mode=0o755)
        call = "import sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
        self._bytes("/usr/local/bin/pip", f"#!/usr/local/bin/python\n{call}".encode(), mode=0o755)

    def tools(self) -> None:
        for name in TOOLS:
            found = shutil.which(name)
            assert found is not None, f"{name}: not on this machine"
            self._program(Path(found).resolve(), f"/bin/{name}")

    def settings(self) -> None:
        self._bytes("/etc/passwd", PASSWD.encode())
        self._bytes("/etc/group", b"root:x:0:\n")
        self._bytes("/etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
        lines = ["[global]", *_pip_settings()]
        bundle = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile
        if bundle:
            self._bytes("/etc/ssl/certs/ca-certificates.crt", Path(bundle).read_bytes())
            lines.append("cert = /etc/ssl/certs/ca-certificates.crt")
        self._bytes("/etc/pip.conf", "\n".join([*lines, ""]).encode())
        for folder, mode in (("/tmp", 0o1777), ("/root", 0o755), ("/proc", 0o755), ("/sys", 0o755), ("/dev", 0o755)):
            self._folder(folder, mode)
        self._folder(SITE)

    def _program(self, path: Path, target: str) -> None:
        self._file(path, target)
        self._libraries(path)

    def _libraries(self, path: Path) -> None:
        """Add what a binary is linked to, where any loader looks by default."""
        listed = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=False).stdout
        for found in re.findall(r"(/\S+) \(0x", listed):
            library = Path(found)
            inside = library.is_relative_to("/lib") or library.is_relative_to("/lib64")
            self._file(library.resolve(), found if inside else f"/usr/lib/{library.name}")

    def _libraries_named(self, name: str) -> None:
        cached = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True).stdout
        match = re.search(rf"^\s*{re.escape(name)} .*=> (\S+)$", cached, re.MULTILINE)
        if match:
            self._file(Path(match[1]).resolve(), f"/usr/lib/{name}")

    def _tree(self, source: Path, target: str, left_out: set[str]) -> None:
        for folder, folders, files in os.walk(source):
            folders[:] = sorted(set(folders) - left_out)
            for name in sorted(files):
                path = Path(folder, name)
                self._file(path, f"{target}/{path.relative_to(source)}")

    def _file(self, path: Path, target: str) -> None:
        executable = path.stat().st_mode & stat.S_IXUSR
        # The time, since compiled modules are valid for sources of their time only.
        self._bytes(target, path.read_bytes(), 0o755 if executable else 0o644, path.stat().st_mtime)

    def _bytes(self, target: str, content: bytes, mode: int = 0o644, time: float = 0) -> None:
        if self._is_new(target):
            entry = tarfile.TarInfo(target.lstrip("/"))
            entry.size, entry.mode, entry.mtime = len(content), mode, int(time)
            self._tar.addfile(entry, io.BytesIO(content))

    def _link(self, target: str, to: str) -> None:
        if self._is_new(target):
            entry = tarfile.TarInfo(target.lstrip("/"))
            entry.type, entry.linkname = tarfile.SYMTYPE, to
            self._tar.addfile(entry)

    def _folder(self, target: str, mode: int = 0o755) -> None:
        entry = tarfile.TarInfo(target.lstrip("/"))
        entry.type, entry.mode = tarfile.DIRTYPE, mode
        self._tar.addfile(entry)

    def _is_new(self, target: str) -> bool:
        new = target not in self._there
        self._there.add(target)
        return new


def _pip_settings() -> Iterator[str]:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    ).stdout
    for key, value in re.findall(r"^(?:global|install|:env:)\.(\S+)='(.*)'$", listed, re.MULTILINE):
        if key in PIP_SETTINGS and not value.startswith(("/", "file:")):  # a folder of this machine is not in the image
            yield f"{key} = {value}"
