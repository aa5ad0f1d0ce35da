"""An engine that says what a script tells it to, and remembers what it was asked."""

from lean_trl.rollout.engine import Completion


class RecordingEngine:
    """script(request, index) -> a Completion's fields but for request_id and index."""

    def __init__(self, script):
        self.script, self.calls, self.requests, self._ready = script, [], [], []

    def submit(self, requests):
        self.calls.append("submit")
        self.requests += requests
        for request in requests:
            for index in range(request.n):
                said = self.script(request, index)
                self._ready.append(Completion(request.id, index, **said))

    def poll(self, timeout=None):
        """One at a time, the last first: the order is nobody's business."""
        return [self._ready.pop()] if self._ready else []

    def cancel(self, ids):
        self._ready = [c for c in self._ready if c.request_id not in set(ids)]

    def sync_weights(self, named_tensors, version):
        self.calls.append(f"sync {version}")

    def sleep(self, level=1):
        self.calls.append("sleep")

    def wake(self, tags=("weights", "kv_cache")):
        self.calls.append("wake")

    def reset_prefix_cache(self):
        self.calls.append("reset")

    def close(self):
        self.calls.append("close")
