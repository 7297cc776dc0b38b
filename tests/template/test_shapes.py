"""A state that changes its names or shapes while it trains could never be loaded: the first save says so, and writes
nothing."""

import pytest
from edits import insert_after, insert_before, replace
from helpers import SMALL, assert_same_run, call, newest

FEW = f"train.py {SMALL} --max_steps 8 --checkpoint_interval 2 --logger_name csv"

# The last line of the set-up, a line after step 5, and what the save of step 6 names.
CHANGES = {
    "a buffer that is None at first": (
        'model.module.register_buffer("average", None)',
        "model.module.average = torch.full((3,), step)",
        "model.average (3,)",
    ),
    "a buffer that grows": (
        'model.module.register_buffer("seen", torch.zeros(0))',
        "model.module.seen = torch.arange(step)",
        "model.seen (0,), model.seen (5,)",
    ),
    "a module that is pruned": (
        "import torch.nn.utils.prune as prune",
        'prune.l1_unstructured(model.module.layers[0], "bias", amount=1)',
        "model.layers.0.bias (4,), model.layers.0.bias_mask (4,), model.layers.0.bias_orig (4,)",
    ),
    "a module that is added": (
        "pass",
        "model.module.head = nn.Linear(2, 1)",
        "model.head.bias (1,), model.head.weight (1, 2)",
    ),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_state_that_changes_its_shape_is_told_by_the_next_save(what, program, cwd):
    before, change, named = CHANGES[what]
    insert_after(program, "set-up is done", before)
    insert_after(program, "step is done", f"if step == 5:\n    {change}")
    error = call(f"{program}/{FEW}", cwd, code=1).stderr
    assert f": {named}; make them in build_model, or not persistent" in error
    assert len(error.splitlines()) == 1 and newest(cwd) == 4


OWN_LOADING = """
class Observed(Model):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.register_buffer("ranges", torch.zeros(0))

    def forward(self, images):
        if self.training:
            self.ranges = images.detach().amax((1, 2, 3))[:3]
        return super().forward(images)

    def _load_from_state_dict(self, state_dict, prefix, *arguments):
        self.ranges = torch.zeros_like(state_dict[f"{prefix}ranges"])
        super()._load_from_state_dict(state_dict, prefix, *arguments)


"""


def test_a_module_that_loads_other_shapes_by_itself_may_change_them(tmp_path, program):
    """As in quantization-aware training."""
    insert_before(program, "functions", OWN_LOADING)
    replace(program, "model", "    return Observed(")
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for cwd, steps in ((whole, 8), (resumed, 4)):
        cwd.mkdir()
        call(f"{program}/{FEW} --lr_schedule constant --max_steps {steps}", cwd)
    call(f"{program}/train.py --resume auto --max_steps 8", resumed)
    assert_same_run(resumed, whole)
