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
        if function is aten.detach.default:
            return cls(function(args[0].kept))
        if function is aten.clone.default:
            raise NotImplementedError("clone")
        if function is aten._to_copy.default:
            return cls(args[0].kept.to(kwargs.get("device")))
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
