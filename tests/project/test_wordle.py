"""The Wordle example: rules, server, games and training."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from websockets.asyncio.client import connect

import weightwire
from game import SOLVED, TURNS, UNKNOWN, WORDS, Game, answer_for, marks_for
from play import EnvironmentGone, Player, Sample
from policy import LONGEST, OPENING, TOKENS, guess_of, marked, new_policy, save_policy, spelled, tokenizer
from pretrain import OPENERS, Teachers, imitate
from support.stores import NOWHERE, Server, answers, free_ports, running
from train import Batch, advantages_of, batch_of, loss_of

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "wordle"


class Environment(Server):
    def __init__(self, root: Path) -> None:
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, str(EXAMPLE / "environment.py"), "--port", str(port)]
        super().__init__(root, command, lambda: answers("GET", f"{self.url}/health"))


class Rollout(Server):
    def __init__(self, root: Path, model: Path, bucket: Path) -> None:
        [port] = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        place = ["--follow", str(bucket), "--into", str(root / "replica"), "--port", str(port), "--threads", "1"]
        command = [sys.executable, "-m", "weightwire", "serve", str(model), *place]
        super().__init__(root, command, lambda: answers("GET", f"{self.url}/health"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Environment]:
    server = Environment(tmp_path_factory.mktemp("environment"))
    with running(server):
        yield server


def ask(url: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as refusal:
        return refusal.code, json.load(refusal)


class TestRules:
    @pytest.mark.parametrize(
        ("guess", "answer", "marks"),
        [
            ("crane", "crane", "+++++"),
            ("build", "stone", "-----"),
            ("stone", "notes", "?????"),
            ("eerie", "bread", "?-?--"),  # one e in the answer: only the first one is marked
            ("geese", "bleed", "-?+--"),  # two: the one in place, and the first of the others
            ("eerie", "geese", "?+--+"),
            ("allow", "llama", "?+?--"),
        ],
    )
    def test_a_letter_is_marked_as_often_as_the_answer_has_it(self, guess: str, answer: str, marks: str) -> None:
        assert marks_for(guess, answer) == marks

    def test_a_game_ends_with_the_word_or_after_six_turns(self) -> None:
        right, *wrong = WORDS
        lost = Game(right)
        for word in wrong[:TURNS]:
            assert not lost.done
            lost = lost.guess(word)
        assert (lost.done, lost.solved, lost.reward) == (True, False, 0.0)
        won = Game(right).guess(wrong[0]).guess(right)
        assert (won.done, won.solved) == (True, True)
        assert won.reward == pytest.approx(0.9)
        assert Game(right).guess(right).reward == 1

    def test_an_unknown_word_costs_a_turn(self) -> None:
        for text in ("zzzzz", "", "crane!", "CRANE"):
            game = Game("crane").guess(text)
            assert (game.turns[0].marks, len(game.turns), game.done) == (UNKNOWN, 1, False)

    def test_the_word_list_is_valid(self) -> None:
        assert list(WORDS) == sorted(set(WORDS))
        assert all(len(word) == 5 and word.isascii() and word.isalpha() and word.islower() for word in WORDS)
        assert set(OPENERS) <= set(WORDS)

    def test_a_seed_chooses_the_answer(self) -> None:
        chosen = [answer_for(seed) for seed in range(500)]
        assert chosen == [answer_for(seed) for seed in range(500)]
        assert len(set(chosen)) > len(WORDS) / 2


class TestEnvironment:
    def test_environment_serves_many_games_at_once(self, environment: Environment) -> None:
        async def game(seed: int) -> list[Any]:
            async with connect(f"{environment.url.replace('http', 'ws')}/ws") as socket:
                received = []
                for kind, data in (("reset", {"seed": seed}), *(("step", {"guess": word}) for word in guesses(seed))):
                    await socket.send(json.dumps({"type": kind, "data": data}))
                    received.append(json.loads(await socket.recv())["data"])
                return received

        def guesses(seed: int) -> list[str]:
            return [next(word for word in WORDS if word != answer_for(seed)), answer_for(seed)]

        async def games() -> list[list[Any]]:
            return await asyncio.gather(*map(game, range(32)))

        for seed, (start, first, second) in enumerate(asyncio.run(games())):
            assert (start["reward"], start["done"], start["observation"]["turns_left"]) == (None, False, TURNS)
            assert first["observation"]["marks"] == marks_for(guesses(seed)[0], answer_for(seed))
            assert (first["reward"], first["done"], first["observation"]["answer"]) == (0, False, None)
            assert (second["reward"], second["done"]) == (pytest.approx(0.9), True)
            assert second["observation"]["answer"] == answer_for(seed)

    def test_invalid_messages_get_an_error_and_keep_the_session(self, environment: Environment) -> None:
        nonsense: dict[str | bytes, str] = {
            "[": "INVALID_JSON",
            "[]": "VALIDATION_ERROR",
            '{"type": "dance"}': "UNKNOWN_TYPE",
            '{"type": "step", "data": {"guess": "crane"}}': "EXECUTION_ERROR",
            '{"type": "step", "data": {"guess": 7}}': "VALIDATION_ERROR",
            '{"type": "step", "data": 7}': "VALIDATION_ERROR",
            '{"type": "reset", "data": {"seed": -1}}': "VALIDATION_ERROR",
            '{"type": "reset", "data": {"episode_id": []}}': "VALIDATION_ERROR",
            '{"type": "reset", "data": {"episode_id": "\\ud800"}}': "VALIDATION_ERROR",
            b'{"type": "state"}': "INVALID_JSON",
        }

        async def converse() -> None:
            async with connect(f"{environment.url.replace('http', 'ws')}/ws") as socket:
                for text, code in nonsense.items():
                    await socket.send(text)
                    told = json.loads(await socket.recv())
                    assert (told["type"], told["data"]["code"]) == ("error", code), text
                await socket.send('{"type": "reset", "data": {}}')
                assert json.loads(await socket.recv())["type"] == "observation"
                await socket.send('{"type": "state"}')
                assert json.loads(await socket.recv())["data"]["step_count"] == 0

        asyncio.run(converse())

    def test_games_without_a_session_are_kept_apart(self, environment: Environment) -> None:
        url = environment.url
        for episode in ("one", "two"):
            assert ask(f"{url}/reset", {"seed": 1, "episode_id": episode})[0] == 200
        for turn in range(TURNS):
            status, told = ask(f"{url}/step", {"action": {"guess": "zzzzz"}, "episode_id": "one"})
            assert (status, told["done"]) == (200, turn == TURNS - 1)
        assert ask(f"{url}/step", {"action": {"guess": "zzzzz"}, "episode_id": "one"})[0] == 409
        assert ask(f"{url}/state?episode_id=two")[1]["step_count"] == 0
        # Without an episode_id, the game that was reset last is used.
        assert ask(f"{url}/step", {"action": {"guess": answer_for(1)}})[1]["reward"] == 1
        assert ask(f"{url}/step", {"action": {}})[0] == 422
        assert ask(f"{url}/step", {"action": {"guess": "crane"}, "episode_id": "three"})[0] == 422
        assert set(ask(f"{url}/schema")[1]) == {"action", "observation", "state"}

    @pytest.mark.parametrize("text", ["\ud800", "a" * 256], ids=["lone surrogate", "too long"])
    def test_an_invalid_string_is_refused(self, environment: Environment, text: str) -> None:
        url = environment.url
        assert ask(f"{url}/reset", {"seed": 1, "episode_id": "good"})[0] == 200
        assert ask(f"{url}/reset", {"episode_id": text})[0] == 422
        assert ask(f"{url}/step", {"action": {"guess": text}})[0] == 422
        status, told = ask(f"{url}/step", {"action": {"guess": "zzzzz"}})  # the refused requests changed nothing
        assert (status, told["observation"]["episode_id"], told["observation"]["turns_left"]) == (200, "good", 5)

    @pytest.mark.parametrize("path", ["reset", "step"])
    def test_a_body_that_is_too_large_is_refused(self, environment: Environment, path: str) -> None:
        status, told = ask(f"{environment.url}/{path}", {"seed": 1, "more": "x" * (1 << 20)})
        assert (status, told["detail"]["message"]) == (422, "the body is larger than 1,048,576 bytes")

    def test_an_address_of_all_machines_must_be_asked_for(self) -> None:
        command = [sys.executable, str(EXAMPLE / "environment.py"), "--host", "0.0.0.0", "--port", "0"]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ran.returncode == 1
        assert ran.stderr == (
            "error: 0.0.0.0: anyone who reaches this address could play\nhint: use 127.0.0.1, or --insecure\n"
        )

    def test_a_port_in_use_is_reported_in_one_line(self, environment: Environment) -> None:
        port = environment.url.rpartition(":")[2]
        command = [sys.executable, str(EXAMPLE / "environment.py"), "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 1
        assert ended.stderr.splitlines()[0] == f"error: 127.0.0.1:{port}: the port is in use by another program"
        assert "Traceback" not in ended.stderr


class TestPolicy:
    def test_text_and_tokens_of_a_game_agree(self) -> None:
        text = ">cranec-r?a-n-e+>zzzzz!!!!!>"
        tokens = [*OPENING, *spelled("crane"), *marked("crane", "-?--+"), *spelled("zzzzz"), *marked("zzzzz", UNKNOWN)]
        assert tokenizer()(text)["input_ids"] == tokens
        assert tokenizer().decode(tokens) == text
        assert guess_of(spelled("crane")) == "crane"

    def test_the_context_holds_a_whole_game(self) -> None:
        assert len(OPENING) + TURNS * (len(spelled("crane")) + len(marked("crane", SOLVED))) - 1 == LONGEST
        assert new_policy().config.max_position_embeddings >= LONGEST

    def test_the_stored_checkpoint_matches_the_policy(self, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        policy = AutoModelForCausalLM.from_pretrained(EXAMPLE / "policy", dtype="auto")
        assert policy.dtype == torch.bfloat16
        assert {name: one.shape for name, one in policy.state_dict().items()} == {
            name: one.shape for name, one in new_policy().state_dict().items()
        }
        assert AutoTokenizer.from_pretrained(EXAMPLE / "policy").get_vocab() == tokenizer().get_vocab()
        assert sum(file.stat().st_size for file in (EXAMPLE / "policy").iterdir()) < 20e6


class TestTeachers:
    def test_careful_players_guess_only_words_that_fit(self) -> None:
        torch.manual_seed(0)
        for row, played in _turns(Teachers().play(20, careful=1.0)):
            assert row[0][0] in OPENERS
            for turn in range(1, played):
                assert all(marks_for(guess, row[turn][0]) == marks for guess, marks in row[:turn])

    def test_careless_players_guess_any_word(self) -> None:
        torch.manual_seed(0)
        rows = list(_turns(Teachers().play(50, careful=0.0)))
        assert not {row[0][0] for row, _ in rows} & set(OPENERS)
        assert any(marks_for(row[0][0], row[1][0]) != row[0][1] for row, _ in rows)

    def test_imitation_makes_the_seen_games_likelier(self) -> None:
        torch.manual_seed(0)
        policy, games = new_policy(), Teachers().play(4, careful=0.5)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
        before = imitate(policy, games)
        before.backward()
        optimizer.step()
        assert imitate(policy, games) < before


def _turns(games: Any) -> Iterator[tuple[list[tuple[str, str]], int]]:
    """The guesses and marks of each game, and how many turns were played."""
    for row, played in zip(games.tokens.tolist(), games.played.tolist(), strict=True):
        words = [[TOKENS[token] for token in row[first + 1 : first + 11]] for first in range(0, len(row), 11)]
        yield [("".join(word[:5]), "".join(one[1] for one in word[5:])) for word in words], sum(played)


def sample(words: list[str], reward: float) -> Sample:
    """A game in which the policy gave all letters the same probability."""
    game = Sample(reward=reward)
    for word in words:
        game.wrote(spelled(word), [-3.0] * 5, version=1)
        game.received(marked(word, "-----"))
    return game


class TestTraining:
    def test_a_game_is_compared_with_those_of_the_same_answer(self) -> None:
        easy = [sample(["crane"], reward) for reward in (0.9, 1.0)]
        hard = [sample(["crane"], reward) for reward in (0.0, 0.1)]
        advantages = advantages_of([easy, hard])
        assert advantages.tolist() == pytest.approx([-0.85, 0.85, -0.85, 0.85], abs=0.02)
        assert advantages_of([[easy[0], easy[0]]]).tolist() == [0.0, 0.0]

    def test_only_tokens_of_the_policy_are_trained_on(self) -> None:
        batch = batch_of([[sample(["crane"], 1.0), sample(["stone", "build"], 0.0)]])
        assert batch.tokens.shape == (2, 23)
        assert batch.written.sum(1).tolist() == [5, 10]
        assert batch.written[1].nonzero().flatten().tolist() == [*range(1, 6), *range(12, 17)]

    def test_a_step_makes_rewarded_guesses_likelier(self) -> None:
        torch.manual_seed(0)
        policy = new_policy()
        batch = batch_of([[sample(["crane"], 1.0), sample(["stone"], 0.0)]])
        before = _likelihoods(policy, batch)
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.01)
        loss_of(policy, batch).backward()
        optimizer.step()
        good, bad = (_likelihoods(policy, batch) - before).tolist()
        assert good > 0 > bad

    def test_stale_games_are_weighted_by_importance_up_to_a_bound(self) -> None:
        torch.manual_seed(0)
        policy = new_policy()
        once = batch_of([[sample(["crane"], 1.0), sample(["stone"], 0.0)]])
        with torch.no_grad():
            losses = [
                loss_of(policy, Batch(once.tokens, once.written, once.logprobs + shift, once.advantages)).item()
                for shift in (0.0, 1.0, -50.0, -60.0)
            ]
        assert losses[1] == pytest.approx(losses[0] / torch.e, rel=0.5)
        assert losses[2] == losses[3]  # both beyond the bound


def _likelihoods(policy: Any, batch: Batch) -> torch.Tensor:
    """The log-probability of each game's guesses."""
    with torch.no_grad():
        logprobs = policy(batch.tokens).logits[:, :-1].log_softmax(-1)
    taken = logprobs.gather(2, batch.tokens[:, 1:, None]).squeeze(2)
    return (taken * batch.written[:, 1:]).sum(1)


class TestPlaying:
    def test_an_unreachable_environment_is_an_error(self, environment: Environment) -> None:
        """The rollout URL only has to pass the health check: no completion is requested."""

        async def play() -> None:
            await Player(
                NOWHERE, [environment.url], groups=1, games=1, seeds=itertools.count(), take=_never, say=print
            ).play()

        with pytest.raises(ExceptionGroup) as caught:
            asyncio.run(play())
        assert caught.group_contains(EnvironmentGone, match="does not answer")

    def test_a_failing_rollout_server_loses_only_its_games(self, environment: Environment) -> None:
        said: list[str] = []

        async def play() -> None:
            player = Player(
                environment.url,
                [environment.url, NOWHERE],
                groups=1,
                games=2,
                seeds=itertools.count(),
                take=_never,
                say=said.append,
            )
            playing = asyncio.create_task(player.play())
            async with asyncio.timeout(60):
                while not any("its games are dropped" in line for line in said):
                    await asyncio.sleep(0.01)
            assert not playing.done()
            playing.cancel()
            await asyncio.wait([playing])

        asyncio.run(play())


async def _never(group: Any) -> None:
    raise AssertionError("no game can have finished")


@pytest.mark.slow
def test_a_restarted_trainer_continues_the_run(environment: Environment, tmp_path: Path) -> None:
    """Trainer, rollout server and environment share only URLs. A restarted trainer continues the run."""
    torch.manual_seed(0)
    model, bucket = tmp_path / "model", tmp_path / "run"
    save_policy(new_policy(), model)
    (tmp_path / "rollout").mkdir()
    rollout = Rollout(tmp_path / "rollout", model, bucket)
    place = ["--bucket", str(bucket), "--environment", environment.url, "--rollout", rollout.url]
    size = ["--model", str(model), "--groups", "2", "--games", "2", "--threads", "1"]
    command = [sys.executable, str(EXAMPLE / "train.py"), *place, *size, "--save", str(tmp_path / "saved")]
    with running(rollout):
        ended = subprocess.run([*command, "--steps", "2"], capture_output=True, text=True, timeout=240)
        assert ended.returncode == 0, ended.stderr
        assert [line.split()[:2] for line in ended.stdout.splitlines()] == [["step", "1"], ["step", "2"]]
        restored = subprocess.run([sys.executable, "-m", "weightwire", "restore", bucket, "-o", tmp_path / "restored"])
        assert restored.returncode == 0
        assert weightwire.digest(tmp_path / "saved") == weightwire.digest(tmp_path / "restored")
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen([*command, "--steps", "1000"], **pipes) as trainer:
            assert trainer.stdout is not None
            assert trainer.stdout.readline().startswith("step 3 ")
            trainer.send_signal(signal.SIGTERM)
            _, errors = trainer.communicate(timeout=120)
            # It ends cleanly, but with an error code: the last step was not reached.
            assert (trainer.returncode, errors.splitlines()[-1]) == (1, "error: stopped before the last step")
            assert "continuing from version 3 (step 2)" in errors
            assert "Traceback" not in errors
            assert "weightwire restore" not in errors  # the first weights are the newest version
