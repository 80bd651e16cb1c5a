"""A pytest plugin that runs diffusers' own model tests on models whose tokens merge.

It patches every model of the classes below when a test builds it. README.md in this folder says how to run
them. Options:

    --merge-ratio R       patch with this ratio; without it the models stay as they are
    --passed FILE         write the names of the tests that passed, one a line, for a comparison
    --compile-on-cpu      run the tests of torch.compile, which need an accelerator, on the CPU too
"""

from __future__ import annotations

import functools
import math
from pathlib import Path
from typing import Any

import diffusers
import pytest

from tokenmerge import NothingToMergeError, Patch, ToMeConfig, apply_token_merging

CLASSES = ("FluxTransformer2DModel", "SD3Transformer2DModel", "UNet2DConditionModel", "WanTransformer3DModel")
# The reasons that diffusers gives for skipping.
ACCELERATOR = ("test requires a hardware accelerator", "test requires accelerator+PyTorch")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("tokenmerge")
    group.addoption("--merge-ratio", type=float, default=None)
    group.addoption("--passed", type=Path, default=None)
    group.addoption("--compile-on-cpu", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    """Start recording, and patch the classes if a ratio is given."""
    plugin = HostTests(config.getoption("--merge-ratio"), config.getoption("--passed"))
    plugin.patch_classes()
    config.pluginmanager.register(plugin)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let tests of compiling run without an accelerator, if asked to."""
    if not config.getoption("--compile-on-cpu"):
        return
    for item in items:
        if item.get_closest_marker("compile") is None:
            continue
        for node in item.listchain():
            node.own_markers = [m for m in node.own_markers if m.kwargs.get("reason") not in ACCELERATOR]


class HostTests:
    """The state of a session of tests.

    Attributes:
        ratio: fraction of tokens removed; None: models are not patched.
        file: file for the names of the tests that pass; None: they are not written.
        handles: handles of the models that the running test has built.
        size: height and width of the token grid of its latest inputs.
        built: number of models that were patched.
        dense: reasons why others were not.
        passed: names of the tests that did.
    """

    def __init__(self, ratio: float | None, file: Path | None) -> None:
        self.ratio = ratio
        self.file = file
        self.handles: list[Patch] = []
        self.size: tuple[int, int] | None = None
        self.built = 0
        self.dense: list[str] = []
        self.passed: list[str] = []

    def patch_classes(self) -> None:
        """Patch every model of the classes at the end of its constructor."""
        for name in CLASSES if self.ratio is not None else ():
            self._patch_class(getattr(diffusers, name))

    def _patch_class(self, cls: Any) -> None:
        original = cls.__init__

        @functools.wraps(original)
        def build(model: Any, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            if type(model) is cls:
                self._patch(model)

        cls.__init__ = build

    def _patch(self, model: Any) -> None:
        try:
            handle = apply_token_merging(model, ToMeConfig(ratio=self.ratio, max_downsample=8))
        except NothingToMergeError as error:
            self.dense.append(str(error))
            return
        self.built += 1
        self.handles.append(handle)
        self._tell_size()

    def _tell_size(self) -> None:
        """Set the size, because diffusers' tests give FLUX random positions, which show no grid."""
        for handle in self.handles:
            if self.size is not None:
                handle.at_size(2 * self.size[0], 2 * self.size[1])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        """Before a test: reset the state, and note the size of all inputs that the test makes."""
        self.handles, self.size = [], None
        case = getattr(item, "instance", None)
        inputs = getattr(case, "get_dummy_inputs", None)
        if self.ratio is None or inputs is None or "Flux" not in type(case).__name__:
            return

        @functools.wraps(inputs)
        def get(*args: Any, **kwargs: Any) -> dict[str, Any]:
            made = inputs(*args, **kwargs)
            side = math.isqrt(made["hidden_states"].shape[1])
            self.size = kwargs.get("height", side), kwargs.get("width", side)
            self._tell_size()
            return made

        case.get_dummy_inputs = get

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a test that passes."""
        if report.when == "call" and report.passed:
            self.passed.append(report.nodeid)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say how many models were patched, and write what passed."""
        if self.file is not None:
            self.file.write_text("".join(f"{name}\n" for name in sorted(self.passed)))
        if self.ratio is not None:
            terminalreporter.write_line(
                f"tokenmerge: {self.built} models patched, {len(self.dense)} left dense"
            )
        for reason in dict.fromkeys(self.dense):
            terminalreporter.write_line(f"left dense: {reason}")
