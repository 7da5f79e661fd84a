"""Flower's SuperLink as a module to run, mended in two places.

It ends within seconds, even while somebody watches a run; and a device is counted as online only by its own key.
"""

import sys
from functools import partial
from importlib import import_module
from typing import Any

import grpc
import uvicorn
from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
from flwr.server.superlink.fleet.grpc_rere.node_auth_server_interceptor import NodeAuthServerInterceptor

#: for which a server that is told to end waits for answers that are under way: a run's log is one until the run's end
END_SECONDS = 3


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


def main() -> None:
    """Run the SuperLink."""
    uvicorn.run = partial(uvicorn.run, timeout_graceful_shutdown=END_SECONDS)
    starter = import_module("flwr.superlink.cli.flower_superlink")
    vars(starter)[NodeAuthServerInterceptor.__name__] = OwnKeyOnly
    sys.argv[0] = "flower-superlink"
    starter.flower_superlink()


if __name__ == "__main__":
    main()
