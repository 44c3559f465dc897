import errno
import hashlib
import io
import os
import re
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedlens.base.errors import DataError
from fedlens.data import download
from fedlens.data.catalogue import CATALOGUE
from fedlens.data.datasets import cifar, mnist
from fedlens.data.download import Resource, extract, fetch, to_stderr
from tests.unit.data.layouts import IDX_FILES, with_facts, write_cifar_python, write_mnist

CONTENT = bytes(range(256)) * 4000  # 1,024,000 bytes: several reads


@dataclass
class Executor:
    """What the server serves, how it misbehaves, and what it was asked."""

    files: dict[str, bytes]
    url: str = ""
    ranges: bool = True
    cuts: list[int] = field(default_factory=list)  # one an answer: hang up after so many bytes
    length: bool = True
    shift: int = 0  # answers to a range begin so many bytes too late
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    state = Executor({"/file.bin": CONTENT})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            state.asked.append((self.path, asked))
            content = state.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            start = int(re.fullmatch(r"bytes=(\d+)-", asked)[1]) if asked and state.ranges else 0
            if start and start >= len(content):
                self.send_error(416)
                return
            if start:
                start += state.shift
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            if state.length:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start : start + state.cuts.pop(0)] if state.cuts else content[start:])

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def resource(site: Executor, *paths: str, content: bytes = CONTENT) -> Resource:
    urls = tuple(site.url + path for path in paths or ("/file.bin",))
    return Resource("file.bin", urls, hashlib.md5(content).hexdigest())


def quiet(name: str, done: int, total: int | None) -> None:
    pass


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_fetched_once(site: Executor, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None]] = []
    path = fetch(resource(site), tmp_path / "new", lambda *report: seen.append(report))
    assert path.read_bytes() == CONTENT
    assert files(tmp_path / "new") == ["file.bin"]
    assert seen[0] == ("file.bin", 0, len(CONTENT))
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert fetch(resource(site), tmp_path / "new", quiet) == path
    assert site.asked == [("/file.bin", None)]


def test_an_earlier_part_is_taken_up(site: Executor, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    assert fetch(resource(site), tmp_path, quiet).read_bytes() == CONTENT
    assert site.asked == [("/file.bin", "bytes=1000-")]
    assert files(tmp_path) == ["file.bin"]


def test_a_part_that_was_whole_needs_no_more_bytes(site: Executor, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(CONTENT)
    assert fetch(resource(site), tmp_path, quiet).read_bytes() == CONTENT
    assert files(tmp_path) == ["file.bin"]


def test_a_server_without_ranges_starts_again(site: Executor, tmp_path: Path) -> None:
    site.ranges = False
    (tmp_path / "file.bin.part").write_bytes(b"x" * (len(CONTENT) + 5))
    assert fetch(resource(site), tmp_path, quiet).read_bytes() == CONTENT


def test_a_part_of_something_else_is_thrown_away(site: Executor, tmp_path: Path) -> None:
    (tmp_path / "file.bin.part").write_bytes(b"y" * 1000)
    assert fetch(resource(site), tmp_path, quiet).read_bytes() == CONTENT
    assert site.asked == [("/file.bin", "bytes=1000-"), ("/file.bin", None)]


@pytest.mark.parametrize("length", [True, False])
def test_dropped_connections_are_taken_up(site: Executor, tmp_path: Path, length: bool) -> None:
    site.cuts = [300_000, 400_000]
    site.length = length
    if length:
        assert fetch(resource(site), tmp_path, quiet).read_bytes() == CONTENT
        assert [asked for _, asked in site.asked] == [None, "bytes=300000-", "bytes=700000-"]
    else:  # nothing tells that the end was not the end, except the checksum
        with pytest.raises(DataError, match="MD5"):
            fetch(resource(site), tmp_path, quiet)
        assert files(tmp_path) == []


def test_a_connection_that_keeps_dropping_leaves_a_part_and_says_so(site: Executor, tmp_path: Path) -> None:
    site.cuts = [10_000] * 10
    with pytest.raises(DataError, match=r"broke after 40000 of 1024000 bytes.*run again to resume") as caught:
        fetch(resource(site), tmp_path, quiet)
    assert caught.value.where == str(tmp_path)
    assert files(tmp_path) == ["file.bin.part"]
    site.cuts = []
    assert fetch(resource(site), tmp_path, quiet).read_bytes() == CONTENT
    assert site.asked[-1] == ("/file.bin", "bytes=40000-")


def test_no_headway_ends_the_attempts(site: Executor, tmp_path: Path) -> None:
    site.cuts = [0] * 10
    with pytest.raises(DataError, match="broke after 0"):
        fetch(resource(site), tmp_path, quiet)
    assert len(site.asked) == 1


def test_a_wrong_checksum_leaves_nothing(site: Executor, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"MD5 [0-9a-f]{32} was expected, and the file had [0-9a-f]{32}"):
        fetch(resource(site, content=b"another"), tmp_path, quiet)
    assert files(tmp_path) == []
    assert len(site.asked) == 1


def test_a_file_on_disk_with_a_wrong_checksum_is_fetched_again(site: Executor, tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"old")
    assert fetch(resource(site), tmp_path, quiet).read_bytes() == CONTENT


def test_the_next_mirror_is_tried(site: Executor, tmp_path: Path) -> None:
    site.files["/wrong"] = b"wrong"
    assert fetch(resource(site, "/none", "/wrong", "/file.bin"), tmp_path, quiet).read_bytes() == CONTENT


def test_an_unknown_file_is_an_error_that_names_the_answer(site: Executor, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="/none: the server answered 404 Not Found"):
        fetch(resource(site, "/none"), tmp_path, quiet)


def test_bytes_that_were_not_asked_for_are_refused(site: Executor, tmp_path: Path) -> None:
    site.shift = 7
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    with pytest.raises(DataError, match="the request was for the bytes from 1000 on"):
        fetch(resource(site), tmp_path, quiet)


def test_without_a_network_there_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(
        DataError, match=r"could not be downloaded: http://127.0.0.1:9/x: .*check the network, and run again"
    ):
        fetch(Resource("x", ("http://127.0.0.1:9/x",), "0" * 32), tmp_path, quiet)
    assert files(tmp_path) == []


def test_a_full_disk_is_not_taken_for_the_network(
    site: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download.os, "fsync", full)
    with pytest.raises(DataError, match="the file cannot be written: No space left"):
        fetch(resource(site), tmp_path, quiet)
    assert "file.bin" not in files(tmp_path)


def test_a_folder_that_cannot_be_made_is_an_error(site: Executor, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(DataError, match="the folder cannot be created"):
        fetch(resource(site), tmp_path / "taken" / "below", quiet)


def test_progress_without_a_terminal_is_a_line_at_each_end(capsys: pytest.CaptureFixture[str]) -> None:
    for done in (0, 1_000_000, 2_000_000):
        to_stderr("x", done, 2_000_000)
    caught = capsys.readouterr()
    assert caught.err == "downloading x: 0.0 of 2.0 MB\ndownloading x: 2.0 of 2.0 MB\n"
    assert caught.out == ""


def test_progress_on_a_terminal_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download.sys.stderr, "isatty", lambda: True, raising=False)
    for done in (0, 1_000_000):
        to_stderr("x", done, 1_000_000)
    assert capsys.readouterr().err == "\rdownloading x: 0.0 of 1.0 MB\rdownloading x: 1.0 of 1.0 MB\n"


def archive(path: Path, members: dict[str, bytes], link: tuple[str, str] | None = None) -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if link:
            info = tarfile.TarInfo(link[0])
            info.type, info.linkname = tarfile.SYMTYPE, link[1]
            tar.addfile(info)
    return path


def test_an_archive_is_unpacked_beside_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").write_text("kept")
    path = archive(tmp_path / "a.tar.gz", {"data/one": b"1", "data/below/two": b"2"})
    assert extract(path, tmp_path, "data") == tmp_path / "data"
    assert files(tmp_path / "data") == ["below", "mine", "one"]
    assert (tmp_path / "data" / "below" / "two").read_bytes() == b"2"
    assert files(tmp_path) == ["data"]  # the archive is removed


@pytest.mark.parametrize(
    ("members", "link"),
    [
        ({"data/../../escaped": b"1"}, None),
        ({}, ("data/link", "/etc/passwd")),
        ({"/data/x/../../../escaped": b"1"}, None),
    ],
)
def test_a_member_that_leaves_the_folder_is_refused(
    tmp_path: Path, members: dict[str, bytes], link: tuple[str, str] | None
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    path = archive(tmp_path / "a.tar.gz", {"data/ok": b"1", **members}, link)
    with pytest.raises(DataError, match="cannot be unpacked"):
        extract(path, folder, "data")
    assert files(folder) == []
    assert files(tmp_path) == ["a.tar.gz", "in"]


def test_a_damaged_archive_leaves_nothing(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.gz", {"data/x": os.urandom(100_000)})
    path.write_bytes(path.read_bytes()[:50_000])
    with pytest.raises(DataError, match="cannot be unpacked"):
        extract(path, tmp_path, "data")
    assert files(tmp_path) == ["a.tar.gz"]


def test_an_archive_without_the_folder_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.tar.gz", {"other/x": b"1"})
    with pytest.raises(DataError, match="has no directory 'data'"):
        extract(path, tmp_path, "data")


def test_fashion_mnist_is_fetched_when_asked_and_only_what_is_missing(
    site: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = with_facts(monkeypatch, "fashion-mnist", train=30, test=20)
    write_mnist(tmp_path / "published", small, ".gz")
    source = tmp_path / "published" / "FashionMNIST" / "raw"
    contents = [(source / f"{file}.gz").read_bytes() for file in IDX_FILES]
    site.files = {f"/{file}.gz": content for file, content in zip(IDX_FILES, contents, strict=True)}
    archives = [
        replace(
            archive,
            urls=(f"{site.url}/gone/{file}.gz", f"{site.url}/{file}.gz"),
            md5=hashlib.md5(content).hexdigest(),
        )
        for archive, file, content in zip(small.archives, IDX_FILES, contents, strict=True)
    ]
    with_facts(monkeypatch, "fashion-mnist", archives=tuple(archives))
    with pytest.raises(DataError, match="--download"):
        mnist.fashion_mnist(tmp_path / "to", False, 0)
    assert site.asked == []
    assert len(mnist.fashion_mnist(tmp_path / "to", True, 0).train) == 30
    before = len(site.asked)
    (tmp_path / "to" / "FashionMNIST" / "raw" / f"{IDX_FILES[1]}.gz").unlink()
    assert len(mnist.fashion_mnist(tmp_path / "to", True, 0).test) == 20
    assert [path for path, _ in site.asked[before:]] == [f"/gone/{IDX_FILES[1]}.gz", f"/{IDX_FILES[1]}.gz"]


def test_cifar_is_fetched_and_unpacked_when_asked(
    site: Executor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = with_facts(monkeypatch, "cifar10", train=20, test=6)
    write_cifar_python(tmp_path / "published", small)
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        tar.add(tmp_path / "published" / "cifar-10-batches-py", "cifar-10-batches-py")
    site.files["/c.tar.gz"] = path.read_bytes()
    md5 = hashlib.md5(path.read_bytes()).hexdigest()
    archive = replace(small.archives[0], urls=(f"{site.url}/c.tar.gz",), md5=md5)
    with_facts(monkeypatch, "cifar10", archives=(archive,))
    assert len(cifar.cifar10(tmp_path / "to", True, 0).train) == 20
    assert files(tmp_path / "to") == ["cifar-10-batches-py"]
    cifar.cifar10(tmp_path / "to", True, 0)
    assert len(site.asked) == 1


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_facts_are_those_that_torchvision_publishes(name: str) -> None:
    from torchvision.datasets import MNIST, FashionMNIST

    theirs = MNIST if name == "mnist" else FashionMNIST
    archives = CATALOGUE[name].archives
    assert [(one.urls[0].rpartition("/")[2], one.md5) for one in archives] == list(theirs.resources)
    assert {one.urls[0].rpartition("/")[0] + "/" for one in archives} <= set(theirs.mirrors)


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_the_facts_of_cifar_are_those_that_torchvision_publishes(name: str) -> None:
    from torchvision.datasets import CIFAR10, CIFAR100

    theirs = CIFAR10 if name == "cifar10" else CIFAR100
    (archive,) = CATALOGUE[name].archives
    assert (archive.urls, archive.md5, archive.take) == ((theirs.url,), theirs.tgz_md5, theirs.base_folder)
    names = [file for file, _ in (*theirs.train_list, *theirs.test_list)]
    assert CATALOGUE[name].files[1] == tuple(f"{theirs.base_folder}/{file}" for file in names)
