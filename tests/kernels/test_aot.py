"""The ahead-of-time harness tells good kernels from bad ones."""

from __future__ import annotations

import pytest

from tests.kernels.aot import ARCHITECTURES, Report, check, compile_cases

pytest.importorskip("triton")


def sample(case: str, arch: int) -> Report:
    (report,) = (r for r in compile_cases("tests.kernels.aot_samples", arch) if r.case == case)
    return report


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_good_kernel_passes(arch):
    report = sample("good", arch)
    assert report.kernel == "product" and report.constants == "BM=128 BN=128 BK=64"
    assert report.num_warps == 8 and report.shared >= 2 * 2 * 128 * 64 * 2  # two stages at least
    check(report, matrix=True)


def test_a_tile_that_does_not_fit_is_caught():
    """256 x 256 fp32 over 64 threads are 1024 registers a thread."""
    report = sample("too large a tile", 80)
    assert report.spills > 100
    with pytest.raises(AssertionError, match="too large a tile"):
        check(report)
