"""The native engine against transformers, the training forward, and its own promises."""

import math
from random import Random

import pytest
import torch

from lean_trl.data.batch import build_batch
from lean_trl.model.loader import load_model
from lean_trl.rollout.cache import SlotCache, bytes_per_token
from lean_trl.rollout.engine import Request, Sampling, generate
from lean_trl.rollout.native import NativeEngine
from lean_trl.types import Example

GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A function: family -> (folder, transformers' model)."""
    pytest.importorskip("transformers")
    from tests.model.tiny import make

    made = {}

    def get(family):
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            made[family] = (folder, make(family, folder))
        return made[family]

    return get


def prompts(count, seed=0, low=3, high=20, vocab=60):
    rng = Random(seed)
    return [
        tuple(rng.randrange(1, vocab) for _ in range(rng.randint(low, high))) for _ in range(count)
    ]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "deepseek_v3"])
def test_greedy_is_that_of_transformers(family, checkpoint):
    """Plain, tied with norms, softcap and windows, sinks, latent attention; slots are reused."""
    folder, theirs = checkpoint(family)
    theirs.generation_config.eos_token_id = None  # random ids end nothing
    engine = NativeEngine(load_model(folder), max_slots=2)
    asked = prompts(5)
    requests = [Request(i, ids, sampling=GREEDY, max_tokens=12) for i, ids in enumerate(asked)]
    for request, completion in zip(requests, generate(engine, requests), strict=True):
        expected = theirs.generate(
            torch.tensor([request.prompt_ids]),
            do_sample=False,
            max_new_tokens=12,
            min_new_tokens=12,
        )[0, len(request.prompt_ids) :]
        assert completion.ids == tuple(expected.tolist())
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_logprobs_are_those_of_the_training_forward(family, checkpoint):
    model = load_model(checkpoint(family)[0])
    sampling = Sampling(temperature=0.7, top_p=0.9, repetition_penalty=1.2)
    requests = [
        Request(i, ids, n=3, sampling=sampling, seed=i, max_tokens=9, stop_ids=frozenset({5}))
        for i, ids in enumerate(prompts(4))
    ]
    for completion in generate(NativeEngine(model, max_slots=5), requests):
        prompt = requests[completion.request_id].prompt_ids
        ids = [*prompt, *completion.ids]
        batch = build_batch([Example(ids, [i >= len(prompt) for i in range(len(ids))])])
        with torch.no_grad():
            expected = model(batch, temperature=0.7).logprobs
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def tiny(vocab=64):
    from lean_trl.model.loader import new_model

    raw = {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "max_position_embeddings": 512,
    }
    return new_model(raw, 0)


class Scripted(NativeEngine):
    """Says token 1 until the length that its prompt's first id stands for, then the stop id 2."""

    def _extend(self, slots, logits):
        for slot in slots:
            sequence = self._running[slot]
            last = len(sequence.ids) + 1 == self.lengths[sequence.request.id]
            self._append(slot, 2 if last else 1, 0.0)


def test_a_freed_slot_takes_the_next_prompt():
    rng = Random(0)
    lengths = {i: rng.randint(4, 256) for i in range(64)}
    engine = Scripted(tiny(), max_slots=8)
    engine.lengths = lengths
    requests = [Request(i, (3, 4), stop_ids=frozenset({2}), max_tokens=256) for i in lengths]
    done = generate(engine, requests)
    assert [len(c.ids) for c in done] == list(lengths.values())
    assert all(c.finish_reason == "stop" and c.ids[-1] == 2 for c in done)
    assert engine.decode_steps <= 1.1 * sum(lengths.values()) / 8


def test_each_prompt_is_read_once():
    engine = NativeEngine(tiny(), max_slots=3)
    asked = prompts(4)
    requests = [Request(i, ids, n=5, max_tokens=6) for i, ids in enumerate(asked)]
    assert len(generate(engine, requests)) == 20
    assert engine.prompt_tokens == sum(map(len, asked))


def answers(engine, requests):
    return {(c.request_id, c.index): c.ids for c in generate(engine, requests)}


def test_tokens_depend_on_the_request_alone():
    model = tiny()
    sampling = Sampling(temperature=1.3, top_k=30)
    asked = prompts(6, seed=1)
    requests = [
        Request(i, ids, n=2, sampling=sampling, seed=100 + i, max_tokens=15)
        for i, ids in enumerate(asked)
    ]
    together = answers(NativeEngine(model), requests)
    assert len(set(together.values())) == 12
    for slots in (1, 4):
        engine = NativeEngine(model, max_slots=slots)
        assert answers(engine, requests[::-1]) == together
    # Another way of drawing beside it changes nothing either.
    mixed = [*requests[:3], Request(9, asked[0], sampling=GREEDY, max_tokens=15)]
    got = answers(NativeEngine(model), mixed)
    assert {key: got[key] for key in got if key[0] < 3} == {
        key: together[key] for key in together if key[0] < 3
    }


def test_polling_submitting_and_cancelling():
    engine = NativeEngine(tiny(), max_slots=2)
    engine.sync_weights((), version=7)
    engine.submit([Request(i, ids, max_tokens=4 + i) for i, ids in enumerate(prompts(4))])
    first = engine.poll()
    assert [c.request_id for c in first] == [0] and first[0].versions == ((0, 7),)
    with pytest.raises(ValueError, match="request id 3 is in use"):
        engine.submit([Request(3, (1,))])
    engine.cancel([1, 3])
    engine.submit([Request(10, (4, 5), n=2, max_tokens=3)])
    rest = []
    while polled := engine.poll():
        rest += polled
    reasons = {(c.request_id, c.index): c.finish_reason for c in rest}
    assert reasons == {
        (1, 0): "abort",
        (3, 0): "abort",
        (2, 0): "length",
        (10, 0): "length",
        (10, 1): "length",
    }
    assert engine.poll() == []
    engine.sleep()
    assert engine._cache is None


def test_all_stop_ids_end_a_completion():
    model = tiny()
    sampled = generate(NativeEngine(model), [Request(0, (3, 4), n=8, max_tokens=30)])
    stops = frozenset({sampled[0].ids[3], sampled[1].ids[5]})
    for completion in generate(
        NativeEngine(model), [Request(0, (3, 4), n=8, max_tokens=30, stop_ids=stops)]
    ):
        hits = [i for i, token in enumerate(completion.ids) if token in stops]
        if completion.finish_reason == "stop":
            assert hits == [len(completion.ids) - 1]
        else:
            assert not hits and len(completion.ids) == 30


def test_the_cache_keeps_to_its_budget():
    model = tiny()
    each = bytes_per_token(model.config, torch.float32) * 30
    engine = NativeEngine(model, kv_cache_gib=3.5 * each / 2**30)
    held = []

    class Watching(SlotCache):
        def append(self, *arguments):
            super().append(*arguments)
            tensors = [*self.keys.values(), *self.values.values()]
            held.append(sum(t.numel() * t.element_size() for t in tensors))

    import lean_trl.rollout.native as native

    original, native.SlotCache = native.SlotCache, Watching
    try:
        generate(engine, [Request(i, (1,) * 10, max_tokens=20) for i in range(7)])
    finally:
        native.SlotCache = original
    assert max(held) == 3 * each
    with pytest.raises(ValueError, match=r"rollout.kv_cache_gib .*: raise it"):
        generate(engine, [Request(0, (1,) * 10, max_tokens=200)])


def test_prompts_longer_than_one_forward(monkeypatch):
    monkeypatch.setattr("lean_trl.rollout.native.PROMPT_TOKENS", 16)
    model = tiny()
    requests = [Request(i, ids, sampling=GREEDY, max_tokens=5) for i, ids in enumerate(prompts(6))]
    small = answers(NativeEngine(model), requests)
    monkeypatch.undo()
    assert answers(NativeEngine(model), requests) == small


def test_ranks_that_are_done_go_on_with_the_others():
    """Every round of the slower rank is a round of the other one."""
    model = tiny()
    rounds = iter([True] * 5 + [False])
    idle = NativeEngine(model, any_rank_busy=lambda busy: next(rounds))
    calls = []
    run = model.run
    model.run = lambda ids, ctx: calls.append(len(ids)) or run(ids, ctx)
    assert generate(idle, []) == []
    assert calls == [1] * 5
    assert math.isfinite(sum(calls))
