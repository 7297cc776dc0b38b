"""Datasets that read from a file which stays open, as a zip or HDF5 file does. The usual place to open it is the first
`__getitem__`, which build_model calls before there are data workers. These are forks, which share what is open."""

import multiprocessing
import os
import re
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from edits import insert_before, replace
from helpers import SMALL, assert_same_run, call, start

from config import TrainConfig
from data import build_datasets
from runtime.loader import start_worker

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the workers of other systems begin without files")

# Stands before `build_datasets`, which it replaces. A sample is an image and its class, as bytes.
OF_FILES = """
import io
import time
import zipfile

SIZE = 65 * 4


class Slow(io.FileIO):
    def read(self, *size):
        time.sleep(0.0005)  # since the call that has set the position
        return super().read(*size)


class OfFile(Dataset):
    def __init__(self, path, length):
        self.path = path
        self.length = length
        self.num_classes = 10
        self.file = None

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if self.file is None:
            self.file = Slow(self.path)
            if self.path.endswith("zip"):
                self.file = zipfile.ZipFile(self.file)
        if self.path.endswith("zip"):
            sample = self.file.read(str(index))
        else:
            self.file.seek(index * SIZE)
            sample = self.file.read(SIZE)
        numbers = torch.frombuffer(bytearray(sample), dtype=torch.float32)
        return numbers[:64].view(1, 8, 8), numbers[64].long()


def build_datasets(config, augment=True):
    lengths = {split: len(images) for split, images in images_of(TrainConfig()).items()}
    return {split: OfFile(f"{config.data_dir}/{split}.KIND", length) for split, length in lengths.items()}


def images_of("""


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """The digits in a zip file and in a plain file for each split."""
    folder = tmp_path_factory.mktemp("files")
    for split, dataset in build_datasets(TrainConfig(), augment=False).items():
        images, targets = dataset.__getitems__(range(len(dataset)))
        rows = np.hstack([images.flatten(1), targets[:, None]]).astype(np.float32)
        (folder / f"{split}.bin").write_bytes(rows.tobytes())
        with zipfile.ZipFile(folder / f"{split}.zip", "w") as file:
            for number, row in enumerate(rows):
                file.writestr(str(number), row.tobytes())
    return folder


@pytest.mark.parametrize("kind", ["zip", "bin"])
def test_data_workers_read_from_a_file_that_the_main_process_has_opened(kind: str, files: Path, tmp_path: Path):
    """They get the samples that the process gets alone. In test.py as well."""
    code = OF_FILES.replace("KIND", kind).replace("TrainConfig()", '__import__("config").TrainConfig()')
    program = replace(tmp_path / "program", "build_datasets", code)
    command = f"{program}/train.py {SMALL} --micro_batch_size 16 --epochs 2 --data_dir {files}"
    alone, workers = tmp_path / "alone", tmp_path / "workers"
    alone.mkdir(), workers.mkdir()
    call(command, alone)
    call(f"{command} --num_workers 2", workers)
    assert_same_run(workers, alone)
    evaluated = [call(f"{program}/test.py --accelerator cpu {more}", workers) for more in ("", "--num_workers 2")]
    assert len({done.stdout for done in evaluated}) == 1


def in_worker(check) -> None:
    """Calls check() in a data worker that has begun."""

    def begin():
        start_worker(0)
        check()

    worker = multiprocessing.get_context("fork").Process(target=begin)
    worker.start()
    worker.join()
    assert worker.exitcode == 0


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_data_worker_goes_on_in_a_file_from_where_it_was(is_deleted: bool, tmp_path: Path):
    path = tmp_path / "file"
    path.write_text("one two three")
    with open(path, buffering=0, mode="rb") as file:
        assert file.read(4) == b"one "
        if is_deleted:
            path.unlink()

        def check():
            assert file.read(4) == b"two "
            assert not os.get_inheritable(file.fileno())

        in_worker(check)
        in_worker(check)
        assert file.read() == b"two three"


def test_a_file_that_is_written_keeps_one_position_for_all(tmp_path: Path):
    """Else a process would write over the lines of another one."""
    with open(tmp_path / "file", buffering=0, mode="w+b") as file:
        file.write(b"main\n")
        in_worker(lambda: file.write(b"worker\n"))
        file.write(b"main\n")
    assert (tmp_path / "file").read_text() == "main\nworker\nmain\n"


def test_lines_that_data_workers_print_into_a_file_are_whole(tmp_path: Path):
    """As of `train.py > log`; those of the run are all there, too."""
    told = """
        import os

        ImageDataset.told = getattr(self, "told", 0) + 1
        print(f"{os.getpid()} fetches {self.told}", flush=True)
    """
    program = insert_before(tmp_path / "program", "fetch", told)
    with open(tmp_path / "log", "w") as log:
        process = start(f"{program}/train.py {SMALL} --num_workers 2 --max_steps 8", tmp_path, stdout=log.fileno())
        assert process.communicate(timeout=300)[1] == "" and process.returncode == 0
    lines = (tmp_path / "log").read_text().splitlines()
    fetched = defaultdict(list)
    own = []
    for line in lines:
        if found := re.fullmatch(r"(\d+) fetches (\d+)", line):
            fetched[found[1]].append(int(found[2]))
        else:
            own.append(line)
    assert len(fetched) >= 4
    for numbers in fetched.values():
        assert numbers == [*range(numbers[0], numbers[-1] + 1)]
    assert own == (next(tmp_path.glob("*-train_out")) / "train.log").read_text().splitlines()
