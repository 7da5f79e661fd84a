"""Flower's SuperLink as a module to run, mended in six places.

It ends within seconds, even while somebody watches a run. Its log has no line for each request: of ten lines that would
be nine. A device is counted as online only by its own key. A database that is busy, or whose disk is full, makes the
server unavailable, for which devices and runs wait, and is no error of it, at which they would give up. No request is
read that is larger than any of Flower's: it is read before it is known whose it is. And it ends with what starts its
apps (`superexec`).
"""

import logging
import sys
from importlib import import_module
from typing import Any

import grpc
import uvicorn
from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor
from flwr.supercore.error import ApiErrorCode, FlowerError
from sqlalchemy import event
from sqlalchemy.engine import Engine, ExceptionContext

from fedtta_flwr.installed import forget_copies
from fedtta_flwr.superexec import end_without

#: for which a server that is told to end waits for answers that are under way: a run's log is one until the run's end
END_SECONDS = 3
#: bytes, of answers, too; Flower cuts tensors into parts of 5 MiB, and its largest app has 10 MB
LARGEST_REQUEST = 16 * 2**20
#: what Flower logs as an error where a device asks whether its key is known (`fleet.is_registered`)
ASKED = "Heartbeat interval 0.0 is out of bounds"
#: SQLite's result codes of what may have passed in a moment: busy, locked, an error of the disk, a full one, no file
PASSING = {5, 6, 10, 13, 14}


class OwnKeyOnly(NodeAuthServerInterceptor):
    """Flower checks that a request is signed, but not that who signed it is the node that it is about to activate."""

    def _wrap_method_handler(self, method_handler: Any, received_public_key: bytes) -> Any:
        answer = method_handler.unary_unary

        def checked(request: Any, context: grpc.ServicerContext) -> Any:
            names_a_key = isinstance(request, (ActivateNodeRequest, RegisterNodeFleetRequest))
            if names_a_key and request.public_key != received_public_key:
                context.abort(grpc.StatusCode.UNAUTHENTICATED, "signed by another key than that of this node")
            return answer(request, context)

        whole = grpc.unary_unary_rpc_method_handler(
            checked,
            request_deserializer=method_handler.request_deserializer,
            response_serializer=method_handler.response_serializer,
        )
        return super()._wrap_method_handler(whole, received_public_key)


def say_unavailable(about: ExceptionContext) -> None:
    """Raise, in place of an error of the database that may pass, the one that Flower answers with "try again"."""
    if getattr(about.original_exception, "sqlite_errorcode", 0) & 0xFF in PASSING:
        raise FlowerError(ApiErrorCode.LINKSTATE_NOT_INITIALIZED, f"the server's state: {about.original_exception}")


def main() -> None:
    """Run the SuperLink."""
    forget_copies()
    serve, own = uvicorn.run, {"timeout_graceful_shutdown": END_SECONDS, "access_log": False}
    uvicorn.run = lambda **options: serve(**options | own)  # Flower asks for a line a request
    logging.getLogger("flwr").addFilter(lambda record: ASKED not in record.getMessage())
    end_without("flwr.superlink.cli.flower_superlink")
    event.listen(Engine, "handle_error", say_unavailable)
    starter = import_module("flwr.superlink.cli.flower_superlink")
    vars(starter).update({NodeAuthServerInterceptor.__name__: OwnKeyOnly, "GRPC_MAX_MESSAGE_LENGTH": LARGEST_REQUEST})
    sys.argv[0] = "flower-superlink"
    starter.flower_superlink()


if __name__ == "__main__":
    main()
