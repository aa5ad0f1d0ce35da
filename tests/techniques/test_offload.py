"""Activation offloading: nothing changes, all moves once, nothing stays, not even after errors."""

from contextlib import nullcontext

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lean_trl.techniques.apply import apply_techniques
from lean_trl.techniques.offload import ActivationOffloading, Store
from lean_trl.techniques.transfer import Arriving, HostMemory, Transport

from .tiny import RAW, gradients, make_batch, make_config, make_model

LAYERS, D = RAW["num_hidden_layers"], RAW["hidden_size"]
OFF = {"activation_checkpointing": False}
MODES = {
    "none": OFF,
    "offload": OFF | {"activation_offloading": True},
    "one stream": OFF
    | {"activation_offloading": True, "activation_offloading_kwargs": {"use_streams": False}},
    "offload + full": {"activation_offloading": True},
    "offload + selective": {
        "activation_offloading": True,
        "activation_checkpointing_kwargs": {"selective": True},
    },
}


def start(memory):
    model = make_model()
    applied = apply_techniques(model, make_config(memory=memory))
    return (
        model,
        applied,
        next((t.store for t in applied.active if isinstance(t, ActivationOffloading)), None),
    )


class Counting(Transport):
    """Counts bytes: of sources that were moved out and live on, and of what came back and lives."""

    def __init__(self, memory, device):
        super().__init__(memory, device)
        self.sources, self.arrived, self.log = [], [], []
        self.most_arrived = 0

    def store(self, data):
        self.sources.append((StorageWeakRef(data.untyped_storage()), data.nbytes))
        self.log.append("store")
        return super().store(data)

    def fetch(self, host):
        arriving = super().fetch(host)
        self.arrived.append((StorageWeakRef(arriving.data.untyped_storage()), host.nbytes))
        self.most_arrived = max(self.most_arrived, alive(self.arrived))
        self.log.append("fetch")
        return Arriving(arriving.data)

    def wait(self, arriving):
        self.log.append("use")
        return super().wait(arriving)

    def next_block(self):
        self.log.append(("block", alive(self.sources)))


def alive(pieces):
    return sum(nbytes for storage, nbytes in pieces if not storage.expired())


def counted(memory):
    model, applied, store = start(memory)
    store.transport = Counting(HostMemory(False, 2**30), torch.device("cpu"))
    return model, applied, store


@pytest.mark.parametrize("mode", MODES)
def test_nothing_changes(mode):
    batch, results = make_batch(30, 34), {}
    for each in ("none", mode):
        model, applied, _ = start(MODES[each])
        for _ in range(2):  # the second one finds the host memory of the first
            with applied():
                scores = model(batch, ("entropy",))
                (scores.logprobs.sum() + scores.entropy.sum()).backward()
        results[each] = (scores.logprobs, gradients(model))
    assert torch.equal(results["none"][0], results[mode][0])
    for name, grad in results["none"][1].items():
        assert torch.equal(grad, results[mode][1][name]), name


def test_with_checkpointing_only_block_inputs_move():
    model, applied, store = counted(MODES["offload + full"])
    batch = make_batch(30, 34)
    with applied():
        model(batch).logprobs.sum().backward()
        block_input = batch.num_tokens * D * 4
        assert store.moved_bytes == (LAYERS - 1) * block_input
        assert store.transport.most_arrived <= 2 * block_input
    assert alive(store.transport.arrived) == alive(store.transport.sources) == 0


def test_without_it_nothing_of_a_block_stays_on_the_device():
    model, applied, store = counted(MODES["offload"])
    batch = make_batch(30, 34)
    with applied():
        scores = model(batch)
        # When a block begins, whatever earlier ones saved is gone from the device.
        at_blocks = [entry[1] for entry in store.transport.log if isinstance(entry, tuple)]
        assert at_blocks == [0] * LAYERS
        assert store.moved_bytes > 10 * (LAYERS - 1) * batch.num_tokens * D * 4
        scores.logprobs.sum().backward()


def test_copies_back_begin_a_block_ahead():
    model, applied, store = counted(MODES["offload + full"])
    with applied():
        model(make_batch(30, 34)).logprobs.sum().backward()
    log = [entry for entry in store.transport.log if entry in ("fetch", "use")]
    # Block 2's input while block 3 runs, block 1's before block 2 starts, ...
    assert log == ["fetch", "fetch", "use", "fetch", "use", "use"]


def test_a_tensor_and_its_views_move_once():
    store = Store(True, False, 0, 2**30)
    whole = torch.arange(12.0).view(3, 4)
    kept = [store.pack(t, 0, set()) for t in (whole, whole.t(), whole[1:], whole.view(-1), whole)]
    assert store.moved_bytes == whole.nbytes
    for saved, expected in zip(
        kept, (whole, whole.t(), whole[1:], whole.view(-1), whole), strict=True
    ):
        assert torch.equal(store.unpack(saved), expected)
    assert kept[0].moved.device is None  # after the last one


def test_a_small_part_moves_alone_and_a_broadcast_is_not_spread():
    store = Store(True, False, 0, 2**30)
    whole = torch.randn(100, 8)
    part, spread = whole[3:5].t(), torch.randn(1, 4).expand(50, 4)
    kept = [store.pack(part, 0, set()), store.pack(spread, 0, set())]
    assert store.moved_bytes == part.nbytes + 4 * 4
    assert torch.equal(store.unpack(kept[0]), part)
    assert torch.equal(store.unpack(kept[1]), spread)


def test_a_changed_tensor_moves_again():
    store = Store(True, False, 0, 2**30)
    tensor = torch.ones(8)
    first = store.pack(tensor, 0, set())
    tensor.mul_(2)
    second = store.pack(tensor, 0, set())
    assert store.unpack(first).sum() == 8 and store.unpack(second).sum() == 16


def test_memory_that_is_used_again_is_not_mistaken():
    store = Store(True, False, 0, 2**30)
    kept = []
    for value in range(20):  # each is freed before the next is made, often at the same address
        kept.append(store.pack(torch.full((64,), float(value)), 0, set()))
    assert [store.unpack(saved)[0].item() for saved in kept] == list(range(20))


def test_parameters_and_small_tensors_stay():
    store = Store(True, False, 64, 2**30)
    weight = torch.nn.Parameter(torch.randn(8, 8))
    assert store.pack(weight, 0, set()) is weight
    staying = {weight.untyped_storage()._cdata}
    assert isinstance(store.pack(weight.t(), 0, staying), torch.Tensor)
    assert isinstance(store.pack(torch.ones(15), 0, set()), torch.Tensor)
    assert store.moved_bytes == 0


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("mode", ["offload", "offload + full"])
def test_nothing_is_left_after_an_error(place, mode):
    model, applied, store = counted(MODES[mode])
    batch = make_batch(30, 34)

    def fail(*_):
        raise RuntimeError("in the middle")

    block = model.blocks[1]
    hook = (
        block.mlp.register_forward_hook(fail)
        if place == "forward"
        else block.register_full_backward_pre_hook(fail)
    )
    with pytest.raises(RuntimeError, match="in the middle"), applied():
        model(batch).logprobs.sum().backward()
    hook.remove()
    assert not store.known and not store.by_block and store.transport.memory.offset == 0
    gradients(model)
    with applied():  # and the next micro-batch is right
        model(batch).logprobs.sum().backward()
    other = make_model()
    other(batch).logprobs.sum().backward()
    expected = gradients(other)
    for name, grad in gradients(model).items():
        assert torch.equal(grad, expected[name]), name


def test_host_memory_is_bounded_and_used_again():
    memory = HostMemory(pin=False, max_bytes=1000)
    first = memory.take(100)
    second = memory.take(100)
    assert second.data_ptr() - first.data_ptr() == 128
    outside = memory.take(5000)  # does not fit: ordinary memory
    assert outside.shape == (5000,) and sum(slab.nbytes for slab in memory.slabs) == 1000
    memory.take_back()
    assert memory.take(100).data_ptr() == first.data_ptr()


def test_options_of_what_is_off_are_refused():
    with pytest.raises(ValueError, match="activation_offloading_kwargs has no effect"):
        make_config(memory={"activation_offloading_kwargs": {"use_streams": False}})


def test_outside_of_a_micro_batch_nothing_moves():
    model, _, store = start(MODES["offload"])
    with nullcontext():
        model(make_batch()).logprobs.sum().backward()
    assert store.moved_bytes == 0
