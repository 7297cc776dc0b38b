"""Optimizers of the kinds that users bring."""

# As the 8-bit optimizers of torchao: the state is a tensor subclass that cannot be cloned. torch loads it once it is
# told that it is safe.
HALVED = '''
import torch
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class Halved(torch.Tensor):
    """A tensor of float32 that is kept in float16."""

    def __new__(cls, kept):
        return torch.Tensor._make_wrapper_subclass(cls, kept.shape, dtype=torch.float32, device=kept.device)

    def __init__(self, kept):
        self.kept = kept

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        if function is aten.copy_.default:
            args[0].kept.copy_(args[1].kept if isinstance(args[1], cls) else args[1])
            return args[0]
        if function is aten.clone.default:
            raise NotImplementedError("clone")
        if function in (aten.detach.default, aten._to_copy.default):
            return cls(args[0].kept.to((kwargs or {}).get("device")))
        args, kwargs = tree_map(lambda x: x.kept.float() if isinstance(x, cls) else x, (args, kwargs or {}))
        return function(*args, **kwargs)


torch.serialization.add_safe_globals([Halved])


class HalvedMomentum(torch.optim.Optimizer):
    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": torch.tensor(lr)})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter not in self.state:
                    self.state[parameter]["momentum"] = Halved(torch.zeros_like(parameter, dtype=torch.float16))
                momentum = self.state[parameter]["momentum"]
                momentum.copy_(0.9 * momentum + parameter.grad)
                parameter.sub_(group["lr"] * momentum)
'''

# Lookahead (Zhang et al. 2019, arXiv:1907.08610): every third step it goes half of the way from the slow weights, which
# it copies from the model at the beginning, to where its inner optimizer is. It has a state_dict of its own.
LOOKAHEAD = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, inner):
        self.inner, self.state, self.defaults = inner, inner.state, inner.defaults
        self.param_groups, self.count = inner.param_groups, 0
        self.parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
        self.slow = [parameter.detach().clone() for parameter in self.parameters]

    def step(self, closure=None):
        self.inner.step(closure)
        self.count += 1
        if self.count % 3 == 0:
            with torch.no_grad():
                for slow, parameter in zip(self.slow, self.parameters):
                    slow.lerp_(parameter, 0.5)
                    parameter.copy_(slow)

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "slow": self.slow, "count": self.count}

    def load_state_dict(self, state):
        self.inner.load_state_dict(state["inner"])
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        self.slow, self.count = state["slow"], state["count"]
"""
