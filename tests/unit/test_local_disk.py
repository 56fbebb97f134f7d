"""Filesystems by texts of mountinfo, and data that are parked in the run's directory, killed at every change of a
file."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path

import pytest

from megarl.buffer.store import OWN_SERVER
from megarl.core.errors import ConfigError, JobError
from megarl.learn import algorithms
from megarl.run import local_disk
from megarl.run.checks.settings import check_settings
from megarl.run.local_disk import Parking, choose, mount_of
from tests.kills import every_kill
from tests.unit.small_job import config_of

MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 0:27 / /dev/shm rw shared:2 - tmpfs tmpfs rw,size=24684096k
31 27 0:40 / /home rw,relatime shared:5 - autofs /etc/auto.home rw,fd=7,indirect
32 31 0:41 / /home/me rw,relatime shared:6 master:3 - nfs4 filer:/home/me rw,vers=4.2,local_lock=none
33 27 0:42 / /direct rw - autofs auto.direct rw,direct
34 33 0:43 / /direct rw - nfs filer:/direct rw,vers=3
35 27 0:44 / /lustre/scratch rw - lustre 10.0.0.1@o2ib:/scratch rw,flock
36 27 0:45 / /gpfs rw - gpfs gpfs0 rw
37 27 0:46 / /mnt/beegfs rw - beegfs beegfs_nodev rw
38 27 0:47 / /mnt/sshfs rw - fuse.sshfs me@host: rw
39 27 0:48 / /mnt/with\\040space rw - cifs //filer/share rw
40 27 259:1 /data/scratch /mnt/bind rw - xfs /dev/nvme0n1 rw
41 35 259:1 /local /lustre/scratch/local rw - xfs /dev/nvme0n1 rw
42 27 0:49 / /container rw - overlay overlay rw,lowerdir=/a,upperdir=/b,workdir=/c
43 27 0:50 / /rootless rw - fuse.fuse-overlayfs fuse-overlayfs rw
44 27 0:51 / /odd rw - newfs newfs rw
"""
TYPES = {
    "/runs/x": "ext4",
    "/dev/shm/x": "tmpfs",
    "/home/other/runs": "autofs",
    "/home/me/runs/x": "nfs4",
    "/home/method": "autofs",
    "/direct/x": "nfs",
    "/lustre/scratch/x": "lustre",
    "/lustre/scratch2": "ext4",
    "/lustre/scratch/local/x": "xfs",
    "/gpfs": "gpfs",
    "/mnt/beegfs/x": "beegfs",
    "/mnt/sshfs/x": "fuse.sshfs",
    "/mnt/with space/x": "cifs",
    "/mnt/bind/x": "xfs",
    "/container/x": "overlay",
    "/rootless/x": "fuse.fuse-overlayfs",
    "/odd/x": "newfs",
}


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """``MOUNTS`` in place of this machine's; tests may append to it. No temporary folder is set."""
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS)
    monkeypatch.setattr(local_disk, "MOUNTS", path)
    for name in local_disk.TEMPORARY:
        monkeypatch.delenv(name, raising=False)
    return path


@pytest.mark.usefixtures("mounts")
def test_types_of_filesystems() -> None:
    assert {path: mount_of(Path(path)).type for path in TYPES} == TYPES
    assert mount_of(Path("/mnt/with space/x")).point == Path("/mnt/with space")


def test_this_machines_own(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("/proc")
    assert mount_of(link / "self") == ("proc", Path("/proc"))
    assert os.path.ismount(mount_of(tmp_path).point) and tmp_path.is_relative_to(mount_of(tmp_path).point)


def test_a_run_on_a_local_filesystem_keeps_its_data(mounts: Path) -> None:
    for path in ("/runs/x", "/dev/shm/x", "/mnt/bind/x", "/container/x", "/rootless/x", "/lustre/scratch/local/x"):
        assert choose(Path(path), "") is None


def test_a_run_on_a_network_filesystem_takes_the_first_local_folder(
    mounts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [Path(path) for path, type in TYPES.items() if local_disk.NETWORK.fullmatch(type)]
    assert len(runs) == 9
    for run_dir in [*runs, Path("/odd/x")]:
        assert choose(run_dir, "") == Path("/tmp")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert choose(runs[0], "") == tmp_path
    monkeypatch.setenv("SLURM_TMPDIR", "/lustre/scratch/tmp")
    assert choose(runs[0], "") == tmp_path
    (tmp_path / "slurm").mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "slurm"))
    assert choose(runs[0], "") == tmp_path / "slurm"


def test_without_a_local_folder_a_run_is_refused(mounts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    with mounts.open("a") as file:
        file.write("50 27 0:60 / /tmp rw - tmpfs tmpfs rw\n51 27 254:0 / " + f"{tmp_path} rw - ext4 /dev/vda rw\n")
    words = (
        r"run.dir=/lustre/scratch/x is on lustre mounted at /lustre/scratch, .*\$TMPDIR=.*/missing: it does not "
        r"exist; /tmp: it is on tmpfs mounted at /tmp, in memory.*set store.folder .* store.url=postgresql://"
    )
    with pytest.raises(ConfigError, match=words):
        choose(Path("/lustre/scratch/x"), "")


def test_a_job_is_refused_before_anything_starts(mounts: Path, tmp_path: Path) -> None:
    with mounts.open("a") as file:
        file.write(f"50 27 0:60 / {tmp_path} rw - beegfs beegfs_nodev rw\n")
    config = config_of(tmp_path / "run", f"store.url={OWN_SERVER}", f"store.folder={tmp_path}")
    with pytest.raises(ConfigError, match=f"store.folder={tmp_path}: it is on beegfs mounted at {tmp_path}"):
        check_settings(config, algorithms.get(config.algorithm.name), 1)
    check_settings(config, algorithms.get(config.algorithm.name), 1, elsewhere=True)


def test_a_folder_that_is_named(mounts: Path, tmp_path: Path) -> None:
    (tmp_path / "odd").mkdir()
    with mounts.open("a") as file:
        file.write(f"50 27 0:60 / {tmp_path}/odd rw - newfs newfs rw\n")
    for folder in (tmp_path, tmp_path / "odd"):
        assert choose(Path("/lustre/scratch/x"), str(folder)) == choose(Path("/runs/x"), str(folder)) == folder
    for name, words in {
        "/dev/shm": "tmpfs mounted at /dev/shm, in memory",
        "/home/me": "nfs4 mounted at /home/me, which is no local disk",
        "/mnt/sshfs": "fuse.sshfs mounted at /mnt/sshfs",
        "/missing": "it does not exist",
        "/proc/version": "no folder that this user can write in",
    }.items():
        with pytest.raises(ConfigError, match=f"store.folder={name}: .*{words}.*; set store.folder to"):
            choose(Path("/runs/x"), name)


class Runs:
    """A run's directory and a local disk, with data that are a number in a file."""

    def __init__(self, root: Path) -> None:
        shutil.rmtree(root, ignore_errors=True)
        self.home, self.disk = root / "run" / "postgres", root / "disk"
        self.home.mkdir(parents=True)
        self.disk.mkdir()

    def taken(self, disk: Path | None = None, use: local_disk.Use = "job") -> Parking:
        place = Parking(self.home, disk or self.disk, use)
        place.take()
        (place.folder / "data").mkdir(exist_ok=True)
        return place

    def parked(self, number: int) -> None:
        place = self.taken()
        write(place, number)
        place.park()

    def moved_away(self) -> Path:
        """Make the data be on another host; returns where they are."""
        note = self.home / local_disk.AWAY
        away = json.loads(note.read_text())
        elsewhere = Path(away["path"]).with_name("elsewhere")
        Path(away["path"]).rename(elsewhere)
        note.write_text(json.dumps(away | {"host": "node7"}))
        return elsewhere


def write(place: Parking, number: int) -> None:
    (place.folder / "data" / "PG_VERSION").write_text(str(number))


def number_of(place: Parking) -> str:
    path = place.folder / "data" / "PG_VERSION"
    return path.read_text() if path.is_file() else ""


def test_data_are_taken_and_parked(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.parked(1)
    assert not any(runs.disk.iterdir()) and not (runs.home / local_disk.AWAY).exists()
    other = tmp_path / "other disk"
    other.mkdir()
    place = runs.taken(other)
    assert place.folder.is_relative_to(other) and place.folder.stat().st_mode & 0o777 == 0o700
    assert number_of(place) == place.version() == "1" and not place.lost
    write(place, 2)
    place.park()
    assert number_of(place) == "2" and place.folder == runs.home and not place.is_local


@pytest.mark.parametrize("elsewhere", [False, True], ids=["this host", "another host"])
@pytest.mark.parametrize("what", ["take", "park"])
def test_a_kill_loses_nothing_and_takes_nothing_old(
    tmp_path: Path, what: str, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every change of a file. Another host has the newest data or none; this one always has them."""
    root = tmp_path / "runs"
    disk = tmp_path / "disk of another host"

    def prepare() -> object:
        shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir()
        runs = Runs(root)
        runs.parked(1)
        if what == "take":
            return Parking(runs.home, runs.disk).take
        place = runs.taken()
        write(place, 2)
        return place.park

    newest, outcomes = {"take": "1", "park": "2"}[what], []
    for _ in every_kill(prepare):  # type: ignore[arg-type]
        runs = Runs.__new__(Runs)
        runs.home, runs.disk = root / "run" / "postgres", root / "disk"
        if elsewhere and any(runs.disk.iterdir()):
            runs.disk.rename(root / "disk that is not seen")
        place = Parking(runs.home, disk if elsewhere else runs.disk)
        place.take()
        outcomes.append("lost" if place.lost else number_of(place))
    assert set(outcomes) == ({newest, "lost"} if elsewhere else {newest}) and len(outcomes) > 5
    # The first kill of ``take`` and the end of ``park`` leave parked data, which every host has.
    assert outcomes[0 if what == "take" else -1] == newest


@pytest.mark.parametrize("gone", [False, True], ids=["on another host", "gone"])
def test_data_that_are_not_there_give_way_to_a_new_store(tmp_path: Path, gone: bool) -> None:
    runs = Runs(tmp_path)
    runs.parked(1)
    first = runs.taken()
    write(first, 2)
    folder = first.folder
    if gone:
        shutil.rmtree(folder)
    else:
        runs.moved_away()
    for use in ("read", "write"):
        with pytest.raises(ConfigError, match="are not in .*run the command there, or start the job again"):
            Parking(runs.home, runs.disk, use).take()  # type: ignore[arg-type]
    assert Parking(runs.home, runs.disk).version() is None, "a new store may be of another PostgreSQL"
    place = runs.taken()
    assert place.lost == (
        f"{folder} of this host, {os.uname().nodename}, is gone" if gone else f"they are on node7: {folder}"
    )
    assert number_of(place) == ""
    assert (runs.home / "data.before_1" / "PG_VERSION").read_text() == "1"
    place.park()
    again = runs.taken()
    assert again.folder == place.folder and again.lost == place.lost, "it has not got the run's steps yet"
    again.settle()
    assert not again.lost and not runs.taken().lost
    write(again, 3)
    again.park()
    assert number_of(runs.taken()) == "3"


def test_a_server_that_was_replaced_parks_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where locks of the run's directory do not hold on other nodes."""
    runs = Runs(tmp_path)
    old = runs.taken()
    write(old, 1)
    elsewhere = runs.moved_away()
    new = runs.taken()
    new.settle()
    write(new, 2)
    old.folder = elsewhere
    with caplog.at_level(logging.WARNING):
        old.park()
    assert "another start has begun a new store" in caplog.text and (elsewhere / "data").is_dir()
    with pytest.raises(JobError, match="another start has begun a new store"):
        old.take()
    new.park()
    assert number_of(runs.taken()) == "2"


def test_a_tool_that_reads_leaves_parked_data_alone(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.parked(1)
    reader = runs.taken(use="read")
    assert number_of(reader) == "1" and not (runs.home / local_disk.AWAY).exists()
    write(reader, 9)
    reader.park()
    assert not any(runs.disk.iterdir())
    place = runs.taken()
    write(place, 2)
    reader = runs.taken(use="read")  # after a kill of the job
    assert reader.folder == place.folder
    reader.park()
    assert number_of(runs.taken()) == "2"


def test_data_that_are_removed_under_a_server_are_not_replaced(tmp_path: Path) -> None:
    place = Runs(tmp_path).taken()
    shutil.rmtree(place.folder)
    with pytest.raises(JobError, match=f"disappeared while the server was running: {place.folder} of this host"):
        place.take()


def test_data_that_cannot_be_parked_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs = Runs(tmp_path)
    place = runs.taken()
    write(place, 1)
    (runs.home / "parking").write_text("in the way")
    place.park()
    assert f"the store's data stay in {place.folder}" in caplog.text
    assert number_of(runs.taken()) == "1"


def test_without_a_disk_data_stay_in_the_run(tmp_path: Path) -> None:
    """A run that was moved to a local filesystem with data on a disk parks them, and has them there from then on."""
    runs = Runs(tmp_path)
    place = runs.taken()
    write(place, 1)
    again = Parking(runs.home, None)
    again.take()
    assert again.folder == place.folder
    again.park()
    again.take()
    assert again.folder == runs.home and number_of(again) == "1" and not again.is_local
