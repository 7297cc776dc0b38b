"""The recipe hparams: the options in the HParams tab of TensorBoard."""

import json
from pathlib import Path

import pytest
import yaml
from helpers import (
    LONG,
    SMALL,
    assert_same_training,
    call,
    killed_and_resumed,
    on_one_and_two,
    run_dir,
    with_recipe,
)
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups

pytestmark = pytest.mark.recipes
TWELVE = f"{LONG} --epochs 12"


def hparams_tab(folder: Path) -> dict[str, tuple[dict, dict]]:
    """What TensorBoard's own code finds for its HParams tab: by the name of a run its options and its metrics."""
    multiplexer = EventMultiplexer()
    multiplexer.AddRunsFromDirectory(str(folder))
    multiplexer.Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    statuses = api_pb2.Status.values()
    request = api_pb2.ListSessionGroupsRequest(slice_size=10, allowed_statuses=statuses)
    context = backend_context.Context(TBContext(data_provider=provider))
    groups = list_session_groups.Handler(RequestContext(), context, "", request).run().session_groups
    found = {}
    for group in groups:
        options = {name: value.string_value or value.number_value for name, value in group.hparams.items()}
        found[group.name] = options, {each.name.tag: each.value for each in group.metric_values}
    return found


def test_the_hparams_tab_has_each_run_once_with_its_options_and_last_values(tmp_path):
    """Also after a resume, which leaves the options of the first start."""
    program = with_recipe("hparams", tmp_path / "program")
    for name, width in (("narrow", 2), ("wide", 5)):
        call(f"{program}/train.py {SMALL} --width {width} --out_dir {name}", tmp_path)
    call(f"{program}/train.py --resume wide --epochs 6", tmp_path)
    found = hparams_tab(tmp_path)
    assert {*found} == {run_dir(tmp_path, "narrow").name, run_dir(tmp_path, "wide").name}
    for name, width in (("narrow", 2), ("wide", 5)):
        folder = run_dir(tmp_path, name)
        options, metrics = found[folder.name]
        assert {*options} == {*yaml.safe_load((folder / "config.yaml").read_text())}
        assert (options["width"], options["epochs"], options["deterministic"]) == (width, 5, "True")
        summary = json.loads((folder / "summary.json").read_text())
        assert metrics["vitals/best"] == pytest.approx(summary["best"])
        for value in ("train/loss", "val/loss", "val/accuracy"):
            assert metrics[value] == pytest.approx(summary["last"][value])


def test_a_run_with_its_options_in_tensorboard_is_resumed_and_the_same_on_two_processes(tmp_path):
    program = with_recipe("hparams", tmp_path / "program")
    options = "--logger_name csv tensorboard"
    killed_and_resumed(f"{program}/{TWELVE} {options}", tmp_path)
    one, two = on_one_and_two(f"{program}/{LONG} --max_steps 8 {options}", tmp_path)
    assert_same_training(two, one)
