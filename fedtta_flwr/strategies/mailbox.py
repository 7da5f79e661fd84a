"""The replies to messages, each by itself: one that is damaged, or never comes whole, holds up none of the others."""

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.app import Array, Error, Message, Metadata, RecordDict
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

if TYPE_CHECKING:
    from flwr.supercore.runtime import RuntimeHttpClient

#: parts of a reply that a SuperLink stores one by one; one of ours has a dozen, and one more for every 20 MB
MOST_PARTS = 1000
AT_A_TIME = 4


def is_far(grid: Grid) -> bool:
    """Return whether nodes are reached through a SuperLink and may come and go; in a simulation all are there."""
    # By name, since to import that class takes a second, which others need not wait.
    return any(kind.__name__ == "HttpGrid" for kind in type(grid).__mro__)


@dataclass
class _Arriving:
    reply: str  # its id
    parts: list[str]
    there: dict[str, bytes] = field(default_factory=dict)

    def fetch(self, fetch: Callable[[str], bytes], most: float) -> None:
        """Fetch missing parts, some at a time: what is larger than it can be is not held until all of it is there."""
        missing = [part for part in self.parts[:MOST_PARTS] if part not in self.there]
        with ThreadPoolExecutor(AT_A_TIME) as threads:
            for first in range(0, len(missing), AT_A_TIME):
                some = missing[first : first + AT_A_TIME]
                for part, content in zip(some, threads.map(fetch, some), strict=True):
                    self.there[part] = content
                if sum(map(len, self.there.values())) > most:
                    raise _TooLargeError(f"larger than {most:,.0f} bytes")


class _TooLargeError(Exception):
    """A reply that is larger than it can be."""


class Mailbox:
    """What has been sent and not been answered yet.

    Flower's own way to collect replies waits minutes for one whose parts are still being sent, or never will be, and
    raises on one that is no message; those that it has fetched until then are lost. It also believes what a reply says
    of itself: who sent it, and what it answers.

    Attributes
    ----------
    waiting : dict of str to int
        Id of a message that was sent -> the node that it was sent to.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, int] = {}
        self._arriving: dict[str, _Arriving] = {}
        self._largest: dict[str, float] = {}

    def push(self, grid: Grid, messages: Sequence[Message], largest: Sequence[float]) -> None:
        """Send messages, to which replies of so many bytes are taken; Flower says of some that they could not be."""
        sent = zip(grid.push_messages(messages), messages, largest, strict=False)  # none where they were too much
        for message_id, message, most in sent:
            if message_id:
                self.waiting[message_id] = message.metadata.dst_node_id
                self._largest[message_id] = most

    def pull(self, grid: Grid) -> list[Message]:
        """Return the replies that have come; who sent them, and what they answer, is as it was asked."""
        if not self.waiting:
            return []
        client = getattr(grid, "_runtime_client", None)
        if client is None:  # in this process
            replies = {r.metadata.reply_to_message_id: r for r in grid.pull_messages(sorted(self.waiting))}
        else:
            replies = self._fetch(client, grid)
        for asked, reply in replies.items():
            reply.metadata.__dict__["_src_node_id"] = self.waiting.pop(asked)  # an error's is Flower's own
            del self._largest[asked]
        return list(replies.values())

    def _fetch(self, client: "RuntimeHttpClient", grid: Any) -> dict[str, Message]:
        """Ask a SuperLink for what is new, and for the parts that were not there when it was asked before."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
        from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectUnavailableError

        run = grid.run.run_id
        new = sorted(self.waiting.keys() - self._arriving.keys())
        if new:
            answer = client.PullMessages(PullAppMessagesRequest(message_ids=new))
            for message, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
                parts = list(dict.fromkeys(part.object_id for part in iterate_object_tree(tree)))
                about = message.metadata
                if about.reply_to_message_id in self.waiting:
                    self._arriving[about.reply_to_message_id] = _Arriving(about.message_id, parts)
        fetch = make_pull_object_fn_protobuf(client.PullObject, grid.node, run)
        replies = {}
        for asked, arriving in list(self._arriving.items()):
            try:
                arriving.fetch(fetch, self._largest[asked])
                found = _inflated(arriving, self._largest[asked])
            except _TooLargeError as error:
                found = Error(ErrorCode.UNKNOWN, f"malformed reply: {error}")
            except ObjectUnavailableError:
                continue  # it is still being sent
            except ObjectPullError:
                found = Error(ErrorCode.REPLY_MESSAGE_UNAVAILABLE, "the device was cut off while it sent its reply")
            about = Metadata(run, "", 0, 0, asked, "", 0.0, 0.0, "query")  # none that it says itself
            if isinstance(found, Error):
                replies[asked] = make_message(about, error=found)
            else:
                replies[asked] = make_message(about, content=found)
            del self._arriving[asked]
            confirm = ConfirmMessageReceivedRequest(node=grid.node, run_id=run, message_object_id=arriving.reply)
            client.ConfirmMessageReceived(confirm)
        return replies


def _inflated(arriving: _Arriving, most: float) -> RecordDict | Error:
    """Return what a reply of so many bytes at most says; an error if that is no message."""
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    try:
        if len(arriving.parts) > MOST_PARTS:
            raise ValueError(f"{len(arriving.parts)} parts, at most {MOST_PARTS} are taken")
        if (size := _of_arrays(arriving.there)) > most:
            raise ValueError(f"arrays of {size:,} bytes, at most {most:,.0f} are taken")
        message = inflate_object_from_contents(arriving.reply, arriving.there)
        if not isinstance(message, Message):
            raise TypeError(f"{type(message).__name__}, expected a message")
        return message.error if message.has_error() else message.content
    except Exception as error:  # of what another machine says nothing can be relied on
        return Error(ErrorCode.UNKNOWN, f"malformed reply: {type(error).__name__}: {error}")


def _of_arrays(there: Mapping[str, bytes]) -> int:
    """Return the bytes of a reply's arrays: each says itself which chunks it is made of, maybe one many times."""
    from flwr.supercore.inflatable.inflatable_object import get_object_body, get_object_head_values_from_object_content

    size = 0
    for content in there.values():
        kind, chunks, _ = get_object_head_values_from_object_content(content)
        if kind == Array.__qualname__:
            made_of = json.loads(get_object_body(content, Array))["arraychunk_ids"]
            size += sum(len(there[chunks[index]]) for index in made_of)
    return size
