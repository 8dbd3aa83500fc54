"""What a thief can do with the key of each role: attacks with every request of S3, on a real store.

SeaweedFS enforces the portable policies of `weightwire policy`. A proxy in front of it enforces those for Amazon S3.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults.actors import bits_at, weights_at
from support.commands import weightwire
from support.iam_policies import AuthorizingProxy
from support.role_keys import KEYS, RoleKeys
from support.signed_requests import send_signed
from support.small_run import bits_of
from support.stores import running, use
from weightwire.bucket import each
from weightwire.bucket.bucket import Bucket, ObjectInfo
from weightwire.bucket.registry import open_bucket
from weightwire.follower.follower import Follower
from weightwire.publisher.publisher import Publisher

pytestmark = pytest.mark.slow

FILES = {"config.json": b'{"model_type": "tiny"}', "tokenizer/vocab.txt": b"a\nb\n"}
SEED = 12
RUN = "weights/team/run"
Objects = dict[str, bytes]
Env = Mapping[str, str]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleKeys]:
    server = RoleKeys(tmp_path_factory.mktemp("stolen-keys"))
    with running(server):
        yield server


@pytest.fixture(scope="module")
def amazon(store: RoleKeys) -> Iterator[AuthorizingProxy]:
    with store.amazon() as proxy:
        yield proxy


@dataclass
class Scene:
    """A run with an object of every kind, and a neighbour. `everything` and `restore` are the administrator's."""

    store: RoleKeys
    endpoint: str
    objects: Objects

    def env(self, key: str) -> dict[str, str]:
        return self.store.through(self.endpoint, key)

    @property
    def targets(self) -> list[str]:
        """The first two objects of each kind."""
        kinds = [_kind(path) for path in self.objects]
        return [path for i, path in enumerate(self.objects) if kinds[:i].count(kinds[i]) < 2]

    def everything(self) -> Objects:
        bucket = self._whole()
        return asyncio.run(_read_all(bucket))

    def restore(self) -> None:
        bucket, found = self._whole(), self.everything()
        for path in found.keys() - self.objects.keys():
            asyncio.run(bucket.delete(path))
        for path, data in self.objects.items():
            if found.get(path) != data:
                asyncio.run(bucket.put(path, data))

    def _whole(self) -> Bucket:
        with pytest.MonkeyPatch.context() as patch:
            use(patch, self.store.env)
            return open_bucket("s3://weights")


async def _read_all(bucket: Bucket) -> Objects:
    found: Objects = {}

    async def read(one: ObjectInfo) -> None:
        found[one.path] = await bucket.get(one.path)

    await each(await bucket.list(""), 16, read)
    return found


@pytest.fixture(scope="module")
def run_objects(store: RoleKeys, tmp_path_factory: pytest.TempPathFactory) -> Objects:
    """Made once: version 1 is an anchor, 2 to 4 are deltas, one with an anchor beside it."""
    into = tmp_path_factory.mktemp("replicas")
    with pytest.MonkeyPatch.context() as patch:
        use(patch, store.env)
        bucket = open_bucket(store.run_url)
        with Publisher(bucket, files=FILES, anchor_every=2) as publisher:
            for step in range(4):
                publisher.publish(weights_at(SEED, step), step=step).wait(60)
        for name in ("gpu-0", "gpu-1"):
            with Follower(bucket, into=into / name, name=name) as follower:
                follower.once()
        asyncio.run(bucket.put("gc/00000000000000000001.json", b"a gc record"))
        asyncio.run(bucket.put("probe/" + 32 * "0", b"left by a probe"))
        asyncio.run(bucket.put("alive.json", b"a sign of life"))
        asyncio.run(open_bucket(store.url("team/run2")).put("run.json", b"of a neighbour"))
        return asyncio.run(_read_all(open_bucket("s3://weights")))


@pytest.fixture(params=["seaweedfs", "amazon"])
def scene(
    request: pytest.FixtureRequest, store: RoleKeys, amazon: AuthorizingProxy, run_objects: Objects
) -> Iterator[Scene]:
    endpoint = {"seaweedfs": store.endpoint, "amazon": amazon.endpoint}[request.param]
    scene = Scene(store, endpoint, run_objects)
    scene.restore()
    yield scene
    scene.restore()


# --- attacks ----------------------------------------------------------------------------------------------------------

EVIL = b"evil"


def replace(env: Env, path: str) -> None:
    send_signed(env, "PUT", path, body=EVIL)


def create(env: Env, path: str) -> None:
    new = f"{path.rpartition('/')[0]}/{path.rpartition('/')[2]}.new"
    send_signed(env, "PUT", new, body=EVIL)
    send_signed(env, "PUT", new + "er", body=EVIL, headers={"if-none-match": "*"})


def copy_over(env: Env, path: str) -> None:
    """Of an object that every role may read."""
    send_signed(env, "PUT", path, headers={"x-amz-copy-source": f"/{RUN}/commits/{0:020d}.json"})


def delete(env: Env, path: str) -> None:
    send_signed(env, "DELETE", path)


def delete_in_bulk(env: Env, path: str) -> None:
    key = path.partition("/")[2]
    body = f"<Delete><Object><Key>{key}</Key></Object></Delete>".encode()
    digest = hashlib.md5(body, usedforsecurity=False).digest()
    headers = {"content-md5": base64.b64encode(digest).decode()}
    send_signed(env, "POST", "weights", query={"delete": ""}, body=body, headers=headers)


def climb(env: Env, path: str) -> None:
    """Some stores shorten paths with dots after they have checked them."""
    key = path.removeprefix(f"{RUN}/")
    for folder in ("replicas/gpu-0.json", "replicas", "probe", "gc", "deltas", "anchors", "shortcuts", "files"):
        up = "/".join([".."] * (folder.count("/") + 1))
        for method in ("PUT", "DELETE"):
            send_signed(env, method, f"{RUN}/{folder}/{up}/{key}", body=EVIL if method == "PUT" else b"")


ATTACKS: dict[str, Callable[[Env, str], None]] = {
    "replace": replace,
    "create": create,
    "copy": copy_over,
    "delete": delete,
    "bulk delete": delete_in_bulk,
    "climb": climb,
}


def harmed(scene: Scene, key: str, attack: str) -> set[str]:
    """The folders and single objects that an attack on objects of every kind changed."""
    for path in scene.targets:
        ATTACKS[attack](scene.env(key), f"weights/{path}")
    after = scene.everything()
    changed = {path for path in {*scene.objects, *after} if scene.objects.get(path) != after.get(path)}
    scene.restore()
    return {_kind(path) for path in changed}


def _kind(path: str) -> str:
    inside = path.removeprefix("team/run/")
    if inside == path or inside.startswith("replicas/"):
        return inside
    return inside[: inside.find("/") + 1] or inside


DATA = {"anchors/", "deltas/"}
BEATS = {"replicas/gpu-0.json", "replicas/gpu-1.json"}
NOTHING: set[str] = set()
ONE = {"replicas/gpu-0.json"}
SWEPT = DATA | BEATS | {"shortcuts/", "probe/"}
CREATED = {"run.json", "epochs/", "commits/", "shortcuts/"}
"""The objects of a publisher that are never replaced."""
PUT = DATA | {"files/", "HEAD.json", "alive.json", "probe/"}

# What each key can do on Amazon S3. This is the promise of docs/buckets.md, written down a second time.
HARM: dict[str, dict[str, set[str]]] = {
    "gpu-0": {"replace": ONE, "copy": ONE},
    "silent": {},
    "blind": {},
    "reader": {},
    "gc": {
        "replace": {"probe/"},
        "create": {"gc/", "probe/"},
        "copy": {"probe/"},
        "delete": SWEPT,
        "bulk delete": SWEPT,
    },
    "publisher": {
        "replace": PUT,
        "create": (PUT | CREATED) - {"run.json", "HEAD.json", "alive.json"},
        "copy": PUT,
    },
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("key", HARM)
def test_stolen_key_harms_only_what_its_role_writes(scene: Scene, key: str, attack: str) -> None:
    expected = HARM[key].get(attack, NOTHING)
    if scene.endpoint == scene.store.endpoint and attack in ("replace", "copy"):
        # SeaweedFS does not know s3:if-none-match, so nothing keeps these keys from replacing what they may create.
        expected = expected | {"gc": {"gc/"}, "publisher": CREATED}.get(key, NOTHING)
    found = harmed(scene, key, attack)
    assert found == expected


@pytest.mark.parametrize("key", KEYS)
def test_stolen_key_cannot_change_the_bucket_or_its_own_permissions(scene: Scene, key: str) -> None:
    env = scene.env(key)
    policy = json.dumps({"Version": "2012-10-17", "Statement": []}).encode()
    attempts = [
        send_signed(env, "PUT", "weights", query={"policy": ""}, body=policy),
        send_signed(env, "DELETE", "weights", query={"policy": ""}),
        send_signed(env, "PUT", "weights", query={"acl": ""}, headers={"x-amz-acl": "public-read-write"}),
        send_signed(env, "PUT", "weights", query={"versioning": ""}, body=b"<VersioningConfiguration/>"),
        send_signed(env, "PUT", "weights", query={"lifecycle": ""}, body=b"<LifecycleConfiguration/>"),
        send_signed(env, "DELETE", "weights"),
        send_signed(env, "PUT", f"{key}-bucket"),
        send_signed(env, "PUT", f"{RUN}/run.json", query={"acl": ""}, headers={"x-amz-acl": "public-read"}),
        send_signed(env, "PUT", f"{RUN}/run.json", query={"tagging": ""}, body=b"<Tagging/>"),
        send_signed(
            env, "POST", "", service="iam", body=b"Action=CreateAccessKey&UserName=admin&Version=2010-05-08",
            headers={"content-type": "application/x-www-form-urlencoded"},
        ),
    ]  # fmt: skip
    assert set(attempts) == {403}
    assert scene.everything() == scene.objects


@pytest.mark.parametrize("key", KEYS)
def test_stolen_key_sees_nothing_outside_its_run(scene: Scene, key: str) -> None:
    env = scene.env(key)
    for prefix in ("", "team", "team/", "team/run", "team/run/", "team/run2/"):
        assert send_signed(env, "GET", "weights", query={"list-type": "2", "prefix": prefix}) == 403, prefix
    assert send_signed(env, "GET", "weights", query={"list-type": "2"}) == 403
    for method in ("GET", "HEAD", "PUT", "DELETE"):
        assert send_signed(env, method, "weights/team/run2/run.json") == 403


@pytest.mark.parametrize("key", ["gpu-0", "silent", "blind", "gc"])
def test_stolen_key_cannot_read_the_heartbeats_of_others_or_weights_without_need(scene: Scene, key: str) -> None:
    """gc verifies the anchors that it keeps, and needs no deltas. Followers need no heartbeats of others."""
    beat = send_signed(scene.env(key), "GET", f"{RUN}/replicas/gpu-1.json")
    delta = next(path for path in scene.objects if "/deltas/" in path)
    changes = send_signed(scene.env(key), "GET", f"weights/{delta}")
    assert (beat, changes) == ((200, 403) if key == "gc" else (403, 200))


@pytest.mark.parametrize("key", HARM)
def test_uploads_in_parts_need_the_same_permission(scene: Scene, key: str) -> None:
    started = {
        _kind(path)
        for path in scene.targets
        if send_signed(scene.env(key), "POST", f"weights/{path}", query={"uploads": ""}) != 403
    }
    expected = HARM[key].get("replace", NOTHING)
    if scene.endpoint == scene.store.endpoint:
        expected = expected | {"gc": {"gc/"}, "publisher": CREATED}.get(key, NOTHING)
    assert started == expected


# --- what a heartbeat can do ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forged", ["garbage", "a lease of version 0"])
def test_forged_heartbeat_delays_gc_and_harms_no_other_replica(
    scene: Scene, forged: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = "replicas/gpu-0.json"
    beat = json.loads(scene.objects[f"team/run/{path}"]) | {"version": 0, "lease": 1e9}
    body = b"\xff garbage" if forged == "garbage" else json.dumps(beat).encode()
    assert send_signed(scene.env("gpu-0"), "PUT", f"{RUN}/{path}", body=body) == 200

    url = scene.store.run_url
    use(monkeypatch, scene.env("gpu-1"))
    with Follower(open_bucket(url), into=tmp_path, name="gpu-1") as follower:
        follower.once()
        assert bits_of(follower.checkpoint()) == bits_at(SEED, 3)
    use(monkeypatch, scene.env("gc"))
    ran = weightwire("gc", url, "--keep-anchors", "1", "--window", "0", "--grace", "0")
    assert "gpu-0" in ran.err, ran
    assert (ran.code, "nothing to delete" in ran.err) == ((1, False) if forged == "garbage" else (0, True))
    data = {path for path in scene.objects if "/deltas/" in path or "/anchors/" in path}
    assert data <= scene.everything().keys()
