"""BTFL: a Bayesian weight between two heads at test time (Zhou et al., KDD 2025)."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtta_flwr.adaptation.entropy import entropy
from fedtta_flwr.heads.base import Fitted, Predictor, Recipe
from fedtta_flwr.heads.training import bits
from fedtta_flwr.options import BTFLOptions

#: a frequency is kept this far from 0 and 1, so that a bit unseen in training excludes nothing for certain
UNSEEN = 1e-6


class BTFL(Predictor):
    r"""Weigh the heads by the probability that a sample is external: Beta prior, discretised likelihoods, entropies.

    With bits :math:`\hat z` of the features (eq. 5) and frequencies of a zero bit :math:`p_s`, of the client
    (:math:`s = l`) and of all (:math:`s = g`),

    .. math::
        \ln q_s &= \sum_i (1 - \hat z_i) \ln p_{s,i} + \hat z_i \ln(1 - p_{s,i}) & \text{(eq. 6)} \\
        u_s &= \exp\big((H_s - \bar H_s) / H_s\big), \quad
        \ln \hat\tau = \tfrac{1}{d} (u_l \ln q_l - u_g \ln q_g) & \text{(eqs. 14-15)} \\
        e &= \mathrm{E}\,\frac{m}{m + (1 - m) \hat\tau}, \quad m \sim \mathrm{Beta}(n_{exd}, n_{ind})
        & \text{(eqs. 13, 21)} \\
        y &= e\, y_g + (1 - e)\, y_l

    ``n_ind`` counts the samples that the client's frequencies explain better and about which its head is surer, the
    global one less sure, than in training; ``n_exd`` those with all three the other way (eqs. 9-11). Above the
    threshold in sum they are pruned (algorithm 1, both from the old counts). Equations 8 and 13 of the paper contradict
    each other about the counts' order; here m is the probability of an external sample.

    A sample is predicted by the counts of those before it, then counted: the batches do not matter. With ``prior =
    "batch"``, the published code's, all samples of a batch are predicted by the counts of the batches before.

    The public code smooths the frequencies, .6 p + .2, leaves the client out of those of all, and bounds the ratio;
    the paper has none of the three, and here they are off: ``smoothing = 0.4``, ``leave-one-out = true`` and ``squash =
    4.0`` switch them on. Without smoothing a frequency keeps 1e-6 from 0 and 1, whose logarithms the paper leaves open.

    Parameters
    ----------
    fitted : Fitted
        Frequencies, mean entropies and how many clients there are.
    options : BTFLOptions
        The paper's form by default; configs/presets/btfl-code.toml is that of the published code.

    Attributes
    ----------
    n_ind, n_exd : float
        Counts of internal and external samples, the prior's 1 each included.
    """

    needs = frozenset({"dle-personal", "dle-global", "clients", "entropy-personal", "entropy-global"})

    def __init__(self, fitted: Fitted, options: BTFLOptions) -> None:
        super().__init__(fitted, options)
        self.options: BTFLOptions = options
        found = fitted.statistics
        own, mean = found["dle-personal"].double(), found["dle-global"].double()
        if options.leave_one_out:
            mean = leave_one_out(mean, own, int(found["clients"]))
        frequencies = torch.stack([own, mean], dim=1)
        frequencies = ((1 - options.smoothing) * frequencies + options.smoothing / 2).clamp(UNSEEN, 1 - UNSEEN)
        self._log_one = (-frequencies).log1p()  # [D, 2]: of the client, of all
        self._log_odds = frequencies.log() - self._log_one
        self._entropies = torch.stack([found["entropy-personal"], found["entropy-global"]]).double()
        self.n_ind, self.n_exd = 1.0, 1.0

    @classmethod
    def recipe(cls, options: BTFLOptions) -> Recipe:  # type: ignore[override]
        """Return plain cross-entropy, with the options' sparsity."""
        return Recipe(sparsity=options.sparsity)

    def reset(self) -> None:
        """Return to the uniform prior."""
        super().reset()
        self.n_ind, self.n_exd = 1.0, 1.0

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        """Return probabilities [B, K], and count the internal and external samples."""
        z = self.extractor(x)
        shared, own = self.logits(z)
        likelihoods = self.log_likelihoods(z)
        entropies = torch.stack([entropy(own), entropy(shared)], dim=1).double()
        log_tau = self.log_ratio(likelihoods, entropies)
        n_exd, n_ind = self._priors(likelihoods, entropies)
        weights = interpolation_weight(n_exd, n_ind, log_tau).to(shared.dtype)
        self.weights = weights
        self.seen += len(x)
        if self.options.mix == "log":
            return torch.lerp(F.log_softmax(own, 1), F.log_softmax(shared, 1), weights.unsqueeze(1)).softmax(1)
        return torch.lerp(own.softmax(1), shared.softmax(1), weights.unsqueeze(1))

    def log_likelihoods(self, features: Tensor) -> Tensor:
        """Return ln q_l and ln q_g, [B, 2], of features [B, D] (eq. 6)."""
        zeros = (~bits(features)).double()
        return zeros @ self._log_odds + self._log_one.sum(0)

    def log_ratio(self, likelihoods: Tensor, entropies: Tensor) -> Tensor:
        """Return the corrected log ratio, ln tau [B] (eqs. 14-15), squashed if the options say so.

        The code's exponents compare H_g with ln 100, whatever the data set.

        Parameters
        ----------
        likelihoods : Tensor
            ln q_l and ln q_g, [B, 2].
        entropies : Tensor
            H_l and H_g in nats, [B, 2].
        """
        typical, scale = self._entropies, entropies
        if self.options.exponents == "code":
            scale = typical = torch.stack([typical[0], typical.new_tensor(math.log(100))])
        exponents = (entropies - typical) / scale.clamp(min=torch.finfo(scale.dtype).tiny)
        weighted = exponents.exp() * likelihoods / len(self._log_one)
        return squash(weighted[:, 0] - weighted[:, 1], self.options.squash)

    def events(self, likelihoods: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
        """Return which samples are internal and which external events, [B] bool each (eqs. 10-11)."""
        ratio = likelihoods[:, 0] - likelihoods[:, 1]
        surer, less_sure = entropies < self._entropies, entropies > self._entropies
        internal = (ratio > 0) & surer[:, 0] & less_sure[:, 1]
        external = (ratio < 0) & less_sure[:, 0] & surer[:, 1]
        return internal, external

    def _priors(self, likelihoods: Tensor, entropies: Tensor) -> tuple[Tensor, Tensor]:
        """Return n_exd and n_ind by which the samples are predicted, [1] or [B]; then count them."""
        internal, external = self.events(likelihoods, entropies)
        n_exd, n_ind = [self.n_exd], [self.n_ind]
        if self.options.prior == "batch":
            self._count(int(internal.sum()), int(external.sum()))
        else:
            for one in (internal.long() - external.long()).tolist():  # two additions each: a recursion, but a cheap one
                self._count(one > 0, one < 0)
                n_exd.append(self.n_exd)
                n_ind.append(self.n_ind)
            n_exd.pop()
            n_ind.pop()
        return likelihoods.new_tensor(n_exd), likelihoods.new_tensor(n_ind)

    def _count(self, internal: int, external: int) -> None:
        """Add events, then prune (algorithm 1)."""
        self.n_ind += internal
        self.n_exd += external
        if (total := self.n_ind + self.n_exd) > self.options.threshold:
            self.n_ind, self.n_exd = (1 + self.options.strength * n / total for n in (self.n_ind, self.n_exd))


def leave_one_out(mean: Tensor, own: Tensor, clients: int) -> Tensor:
    """Return the mean of the others from that of all `clients`, one's `own` included unless they are 0; alone, own."""
    if not clients:
        return mean
    return own if clients == 1 else (clients * mean - own) / (clients - 1)


def squash(log_ratio: Tensor, bound: float) -> Tensor:
    r"""Return :math:`\pm \ln(1 + k \tanh(e^{|r|} - 1))`, with the sign of r; r itself for a bound k of 0."""
    return log_ratio.sign() * (bound * log_ratio.abs().expm1().tanh()).log1p() if bound else log_ratio


def interpolation_weight(n_exd: Tensor, n_ind: Tensor, log_tau: Tensor, nodes: int = 160) -> Tensor:
    r"""Return :math:`e = \mathrm{E}[m / (m + (1 - m) \tau)]` for m ~ Beta(n_exd, n_ind) (eq. 21).

    With a = n_exd and b = n_ind it is the closed form

    .. math:: e = \frac{a}{(a + b) \tau}\, {}_2F_1\big(1, a + 1; a + b + 1; 1 - 1 / \tau\big)

    whose numerator and hypergeometric function overflow, or lose all digits, for extreme ratios and counts. In the
    logits s of m both factors of the integral are analytic within a distance of pi, so that the trapezoidal rule on
    equidistant nodes converges exponentially: e is a weighted mean of :math:`\sigma(s - \ln \tau)`, always in [0, 1],
    never increasing in tau, and :math:`e(a, b, \tau) + e(b, a, 1 / \tau) = 1`.

    Parameters
    ----------
    n_exd, n_ind : Tensor
        [], [1] or [B], at least 1.
    log_tau : Tensor
        [B]; infinite values are allowed.
    nodes : int
        160 give an absolute error below 1e-12.

    Returns
    -------
    Tensor
        [B], in [0, 1].
    """
    a, b = n_exd.double().unsqueeze(-1), n_ind.double().unsqueeze(-1)
    width = 7 * (1 / a + 1 / b).sqrt()
    left, right = 30 / a + width, 30 / b + width
    s = (a / b).log() - left + (left + right) * torch.linspace(0, 1, nodes, dtype=a.dtype, device=a.device)
    shares = (a * F.logsigmoid(s) + b * F.logsigmoid(-s)).softmax(-1)
    return (shares * (s - log_tau.double().unsqueeze(-1)).sigmoid()).sum(-1).clamp(0, 1)
