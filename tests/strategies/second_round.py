"""A client's second round written out in float64, for strategies that add a term to its loss."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtta_flwr.config import RunConfig
from fedtta_flwr.data.datasets import open_test_set
from fedtta_flwr.data.streams import make_stream
from fedtta_flwr.server import make_strategy
from tests.test_client import CLIENTS, Node, state_for, uploaded

State = dict[str, Tensor]
#: features [B, D] and logits [B, K]
Outputs = tuple[Tensor, Tensor]
#: the term, given what the present, the received and the client's previous model make of the batch
Term = Callable[[Outputs, Outputs, Outputs], Tensor]
CLIENT = CLIENTS[:1]


def requested(config: RunConfig) -> dict[str, float]:
    """The terms as a visit's request names them."""
    return {f"objective.{key}": value for key, value in make_strategy(config).objectives.items()}


def visit(node: Node, config: RunConfig, number: int, received: State | None = None) -> State:
    """What the client uploads."""
    return state_for(node.visit(CLIENT, received, round=number, **requested(config)))


def outputs_of(model: nn.Module, x: Tensor) -> Outputs:
    """With the batch's own statistics."""
    head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    seen: list[Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    logits = model.train()(x)
    hook.remove()
    return seen[0], logits


@dataclass(frozen=True)
class SecondRound:
    """The second step of one client: what it uploaded, and the same by hand with and without the term."""

    found: Tensor
    expected: Tensor
    without: Tensor

    def check(self) -> None:
        """The term is what was added, and it matters."""
        effect = (self.expected - self.without).norm()
        assert effect > 1e-5
        assert (self.found - self.expected).norm() < 1e-2 * effect


def second_round(config: RunConfig, resnet8: nn.Module, term: Term) -> SecondRound:
    """One step of TTA-grad (SGD), from a mixture that is neither the source nor the client's own model."""
    node, rate = Node(config), config.entropy.learning_rate
    own = visit(node, config, 1)
    source = resnet8.state_dict()
    mixture = {name: (t + 3 * source[name]) / 4 for name, t in own.items()}
    sent = visit(node, config, 2, mixture)

    x = make_stream(config, CLIENT[0], open_test_set("digits", "", config.seed)).batch(1)[0].double()
    models = []
    for state in (mixture, mixture, own):
        model = deepcopy(resnet8).double()
        model.load_state_dict({name: t[0].double() for name, t in state.items()}, strict=False)
        models.append(model.requires_grad_(True))
    present, received, previous = (outputs_of(model, x) for model in models)
    log_p = F.log_softmax(present[1], dim=1)
    entropy = -(log_p.exp() * log_p).sum(dim=1).mean()
    fixed = [tuple(t.detach() for t in outputs) for outputs in (received, previous)]
    parameters = dict(models[0].named_parameters())

    def step(loss: Tensor) -> Tensor:
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
        return torch.cat(
            [(p - rate * g).flatten() for p, g in zip(parameters.values(), gradients, strict=True)]
        ).detach()

    return SecondRound(
        found=torch.cat([sent[name].double().flatten() for name in parameters]),
        expected=step(entropy + term(present, *fixed)),
        without=step(entropy),
    )


def check_that_the_previous_model_survives(config: RunConfig) -> None:
    """In another process, and while the same process serves somebody else; and it matters that it does."""
    here, there, forgetful = (Node(config) for _ in range(3))
    received = visit(here, config, 1)
    source = {name: t * 0.99 for name, t in received.items()}
    there.context.state = deepcopy(here.context.state)
    forgetful.context.state = deepcopy(here.context.state)
    forgetful.context.state.config_records[CLIENT[0]]["parts"] = []
    here.visit(CLIENTS[2:], **requested(config))
    one, other, lost = (
        uploaded(node.visit(CLIENT, source, round=2, **requested(config))) for node in (here, there, forgetful)
    )
    assert one == other
    assert one != lost
