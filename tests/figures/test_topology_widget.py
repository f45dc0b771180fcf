"""The topology explorer: every machine can be explored, complaints are shown, a stored notebook keeps the picture."""

import pytest
from figures import Opened

from course_utils.topology import REFERENCES, cluster, reference, two_level
from lessons.gpu_interconnects.explorer import topology_explorer


class Explorer(Opened):
    def __init__(self, *arguments):
        super().__init__(topology_explorer(*arguments))

    @property
    def complains(self):
        return self.status.value.startswith("<p><b>")


@pytest.fixture(scope="module")
def explorer():
    return Explorer()


def test_first_picture_is_there_and_the_same_each_time(explorer):
    assert explorer.machine.value == "2 x dgx h100"
    assert bytes(explorer.picture.value).startswith(b"\x89PNG")
    assert Explorer().picture.value == explorer.picture.value
    assert "50 GB/s" in explorer.status.value and "14 µs" in explorer.status.value
    assert "1.36 ms" in explorer.status.value  # of 64 MiB


def test_every_machine_can_be_chosen(explorer):
    assert {*REFERENCES, "this machine"} <= set(explorer.machine.options)
    pictures = set()
    for name in explorer.machine.options:
        explorer.machine.value = name
        pictures.add(bytes(explorer.picture.value))
        if name != "this machine":
            assert not explorer.complains
            assert "https://" in explorer.status.value and "Modelled" in explorer.status.value
    assert len(pictures) >= len(explorer.machine.options) - 1  # DGX H100 and H200 differ in the title


def test_other_ends_another_path_and_a_complaint_keeps_the_machine():
    explorer = Explorer([reference("dgx a100"), two_level(2, 2, (1e-6, 1e-9), (1e-5, 1e-8))])
    assert explorer.machine.options == ("dgx a100", "2 x 2 GPUs")
    before = explorer.picture.value
    explorer.end.value = "CPU1"
    assert "Infinity Fabric" in explorer.status.value and "known between GPUs only" in explorer.status.value
    assert explorer.picture.value != before
    explorer.end.value = explorer.start.value
    assert explorer.complains and "two different devices" in explorer.status.value
    explorer.end.value = "GPU7"
    assert not explorer.complains
    assert explorer.picture.value == before


def test_size_changes_the_time_and_not_the_picture():
    explorer = Explorer([reference("pcie workstation")])
    picture = explorer.picture.value
    explorer.size.value = 2**30
    assert "time of 1 GiB" in explorer.status.value and "34.1 ms" in explorer.status.value
    explorer.size.value = 2**10
    assert "time of 1 KiB" in explorer.status.value and "5.73 µs" in explorer.status.value
    assert explorer.picture.value == picture


def test_machines_need_names_of_their_own():
    for machines in ([], [reference("dgx a100"), reference("dgx a100")]):
        with pytest.raises(ValueError, match="names of their own"):
            topology_explorer(machines)
    assert Explorer([cluster("dgx a100", 3)]).end.value == "node2.GPU7"
