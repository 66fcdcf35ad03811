"""Modules of one's own that are flattened by themselves, or are not: the same bits as without, whatever they do."""

import functools
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from small_env import SmallEnv
from together import Together
from torch import Tensor, nn
from torch.nn import functional

from rollflow import Columns, Forward, MultiAgentRollout, RLModule, Rollout
from rollflow.nodes import ConnectorV2
from rollflow.stream.data.tree import leaves_of

BOX, TWO = spaces.Box(-9.0, 9.0, (4,)), spaces.Discrete(2)
FLAT = "forward pass flat"


class Drawing(SmallEnv):
    """Shows numbers that its generator draws, as one vector or in a Dict."""

    observation_space = BOX
    length = 30
    is_nested = False

    def look(self) -> Any:
        shown = self.np_random.standard_normal(4).astype(np.float32)
        return {"a": shown[:3], "b": {"c": shown[3:]}} if self.is_nested else shown


class Nested(Drawing):
    observation_space = spaces.Dict({"a": spaces.Box(-9, 9, (3,)), "b": spaces.Dict({"c": spaces.Box(-9, 9, (1,))})})
    is_nested = True


class Own(RLModule):
    """Two layers; `prepare` adds to them, and `logits` says how they are used."""

    scale = 0.5

    def setup(self) -> None:
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 2)
        self.calls, self.threshold, self.cache = 0, 0.3, None
        self.history, self.settings, self.array = [], {"scale": 2}, np.ones(1)
        self.act = functools.partial(functional.softmax, dim=-1)
        self.register_buffer("mean", torch.zeros(4))
        self.prepare()

    def prepare(self) -> None:
        pass

    def net(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)))

    def logits(self, obs: Any) -> Any:
        return self.net(obs)

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return {"action_dist_inputs": self.logits(batch["obs"])}


def made(logits: Any = None, prepare: Any = None, parts: dict[str, Any] | None = None) -> Own:
    given = {name: part for name, part in (("logits", logits), ("prepare", prepare)) if part is not None}
    return type("Made", (Own,), given | (parts or {}))()


def columns_of(
    module: RLModule, flat: bool | None, env: Any = Drawing, *, publishes: bool = True, **options: Any
) -> tuple[list[Any], str]:
    """The bytes of all that a rollout of 400 vector steps gives, with weights published on the way; how it explains."""
    COUNTS.clear()
    random.seed(0)
    torch.manual_seed(0)
    found = []
    made: Any = {"num_envs": 2, "fragment_length": 50, "num_fragments": 8, "seed": 3, **options}
    with Rollout(env, module=module, forward=Forward(flat=flat), **made) as rollout:
        for number, fragment in enumerate(rollout.fragments()):
            if number == 3 and publishes:
                rollout.publish({name: value * 1.1 for name, value in module.state_dict().items()})
            found += [leaf.tobytes() for name in fragment.columns for leaf in leaves_of(fragment.column(name))]
        return found, str(rollout.explain())


# What must not be replayed

COUNTS = Counter[str]()
LIST: list[int] = []
STEP = 0


def counts_on_itself(self: Any, obs: Any) -> Any:
    self.calls += 1
    return self.net(obs) * (-1 if self.calls % 300 == 299 else 1)


def counts_in_a_global(self: Any, obs: Any) -> Any:
    global STEP
    STEP += 1
    return self.net(obs)


def counts_in_a_global_object(self: Any, obs: Any) -> Any:
    COUNTS["calls"] += 1
    return self.net(obs) * (-1 if COUNTS["calls"] > 300 else 1)


def counter() -> Callable[[Any, Any], Any]:
    calls = 0

    def logits(self: Any, obs: Any) -> Any:
        nonlocal calls
        calls += 1
        return self.net(obs)

    return logits


def caches(self: Any, obs: Any) -> Any:
    if self.cache is None or self.cache.shape != obs.shape:
        self.cache = obs.clone()
    return self.net(obs + self.cache)


def counts_in_a_parameter(self: Any, obs: Any) -> Any:
    self.head.weight.calls = 1
    return self.net(obs)


def counts_on_its_class(self: Any, obs: Any) -> Any:
    type(self).calls = 1
    return self.net(obs)


def counts_in_its_dict(self: Any, obs: Any) -> Any:
    self.__dict__["calls"] += 1
    return self.net(obs)


def registers(self: Any, obs: Any) -> Any:
    self.register_buffer("last", obs, persistent=False)
    return self.net(obs)


def writes_a_buffer(self: Any, obs: Any) -> Any:
    self.mean.mul_(0.9).add_(obs.mean(0), alpha=0.1)
    return self.net(obs - self.mean)


def writes_its_batch(self: Any, obs: Any) -> Any:
    obs["a"] = obs["a"] + 1
    return self.net(torch.cat([obs["a"], obs["b"]["c"]], -1))


def writes_a_default(self: Any, obs: Any, calls: Tensor = torch.zeros(1)) -> Any:  # noqa: B008
    calls += 1
    return self.net(obs) * calls.fmod(2)


def reads_by_a_format(self: Any, obs: Any) -> Any:
    template = "{0.scale}"
    return self.net(obs) * float(template.format(self))


def reads_by_a_pattern(self: Any, obs: Any) -> Any:
    match self:
        case nn.Module(scale=scale):
            return self.net(obs) * scale


def by_autocast(self: Any, obs: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return self.net(obs).float()


def by_gradient(self: Any, obs: Any) -> Any:
    with torch.inference_mode(False), torch.enable_grad():
        x = obs.clone().requires_grad_()
        return torch.autograd.grad(self.net(x).sum(), x)[0][:, :2].clone()


def catches_a_refusal(self: Any, obs: Any) -> Any:
    try:
        return self.net(-obs if obs.max() > 2.5 else obs)
    except Exception:
        return self.net(obs)


def catches_an_error(self: Any, obs: Any) -> Any:
    try:
        return self.net(self.table(obs[:, 0].round().long()) + obs)
    except IndexError:
        return self.net(-obs)


def leaves_by_finally(self: Any, obs: Any) -> Any:
    logits = self.net(-obs)
    try:
        logits = self.net(self.table(obs[:, 0].round().long()) + obs)
    finally:
        return logits  # noqa: B012


class Scale(tuple[int, ...]):
    factor = 2.0


class Shifted:
    def __init__(self, obs: Any) -> None:
        self.shifted = obs + 1

    def add(self, x: Any) -> Any:
        return x + self.shifted


get_setting = {"scale": 2.0}.get


def attribute(name: str, value: Callable[[], Any]) -> Callable[[Any], None]:
    return lambda self: setattr(self, name, value())


def with_noise(self: Any) -> None:
    self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5))


def hooked(register: str) -> Callable[[Any], None]:
    return lambda self: getattr(self.body, register)(lambda module, args, output=None: None)


def scripted(self: Any) -> None:
    with pytest.warns(DeprecationWarning, match="trace"):
        self.body = torch.jit.trace(nn.Linear(4, 8), torch.zeros(2, 4))


def counts_lookups(self: Any, name: str) -> Any:
    self.__dict__["calls"] = self.__dict__.get("calls", 0) + 1
    return nn.Module.__getattr__(self, name)


CHANGED, DRAWS, KEEPS = "what its passes read has changed", "it draws random numbers", "keeps what may change"
KEPT: dict[str, tuple[Any, ...]] = {
    "counter in an attribute": ("counts_on_itself stores 'calls'", counts_on_itself),
    "counter in a global": ("counts_in_a_global stores 'STEP'", counts_in_a_global),
    "counter in a global object": ("reads 'COUNTS', which may change", counts_in_a_global_object),
    "counter in a closure": ("stores 'calls'", counter()),
    "list in a closure": (KEEPS, (lambda calls: lambda self, obs: calls.append(1) or self.net(obs))([])),
    "default value": (KEEPS, lambda self, obs, calls=[]: calls.append(1) or self.net(obs)),
    "counter in a parameter": ("stores 'calls'", counts_in_a_parameter),
    "counter of the class": ("stores 'calls'", counts_on_its_class),
    "tensor of the class": (
        "it reads 'steps', a Tensor that may change",
        lambda self, obs: self.net(obs) * self.steps.add_(1).fmod(2),
        None,
        {"steps": torch.zeros(1)},
    ),
    "counter by setattr": ("setattr", lambda self, obs: setattr(self, "calls", self.calls + 1) or self.net(obs)),
    "counter in its dict": ("loads '__dict__'", counts_in_its_dict),
    "list append": ("reads 'history', a list that may", lambda self, obs: self.history.append(1) or self.net(obs)),
    "cached tensor": ("stores 'cache'", caches),
    "registered buffer": ("calls Module.register_buffer of torch", registers),
    "buffer in place": ("it changes a tensor in place", writes_a_buffer),
    "statistics in place": (
        "it changes a tensor in place",
        lambda self, obs: self.net(functional.batch_norm(obs, self.mean, self.mean + 1, training=True)),
    ),
    "default tensor": ("writes_a_default keeps what may change", writes_a_default),
    "nested batch": ("it changes its batch", writes_its_batch),
    "branch on bool": ("it calls __bool__", lambda self, obs: self.net(obs if obs.sum() > -6 else -obs)),
    "shape by elements": (CHANGED, lambda self, obs: self.net(obs) * (1 - (obs > 1.9).nonzero().shape[0])),
    "count by elements": (
        CHANGED,
        lambda self, obs: self.net(obs) + sum(1 for _ in torch.cat([obs, obs[obs[:, 0] > 1.9]]).unbind()),
    ),
    "branch on item": ("it calls item", lambda self, obs: self.net(obs * (1 if obs[0, 0].item() < 2 else 2))),
    "numpy": ("'np', which may change", lambda self, obs: self.net(torch.from_numpy(np.tanh(obs.numpy())))),
    "noise of numpy": (
        "errstate.__call__.<locals>.inner handles exceptions",
        lambda self, obs: self.net(obs + torch.from_numpy(np.random.default_rng(0).random((1, 4))).float()),
    ),
    "time": ("calls time", lambda self, obs: self.net(obs) * (1.0 if time.time() > 0 else 2.0)),
    "noise of Python": ("calls Random.random", lambda self, obs: self.net(obs) * random.random()),
    "noise through map": ("calls Random.random", lambda self, obs: self.net(obs) * sum(map(random.uniform, [0], [1]))),
    "noise of torch": (DRAWS, lambda self, obs: self.net(obs + torch.randn_like(obs))),
    "bernoulli": (DRAWS, lambda self, obs: self.net(obs.sigmoid().bernoulli())),
    "generator": (
        "reads 'generator'",
        lambda self, obs: self.net(obs) + torch.rand(len(obs), 2, generator=self.generator),
        attribute("generator", lambda: torch.Generator().manual_seed(1)),
    ),
    "seeded generator": (
        "manual_seed",
        lambda self, obs: self.net(obs) + torch.rand(len(obs), 2, generator=torch.Generator().manual_seed(3)),
    ),
    "dropout of a function": ("draws random numbers", lambda self, obs: functional.dropout(self.net(obs))),
    "dropout in training": (DRAWS, None, with_noise, {"train": lambda self, mode=True: nn.Module.train(self, True)}),
    "setting": ("'settings', a dict", lambda self, obs: self.net(obs) * self.settings["scale"]),
    "array": ("calls ndarray.item", lambda self, obs: self.net(obs) * self.array.item()),
    "default dtype": ("calls get_default_dtype", lambda self, obs: self.net(obs.to(torch.get_default_dtype()))),
    "getattr": ("calls getattr", lambda self, obs: self.net(obs) * getattr(self, "scale", 1.0)),
    "format": ("calls str.format", reads_by_a_format),
    "pattern": ("matchs", reads_by_a_pattern),
    "print": ("stores", lambda self, obs: print(end="") or self.net(obs)),  # noqa: T201
    "object": ("Shifted.__init__ stores 'shifted'", lambda self, obs: self.net(Shifted(obs).shifted)),
    "autocast": ("of torch", by_autocast),
    "gradient": ("calls grad of torch", by_gradient),
    "own __getattr__": ("counts_lookups loads '__dict__'", None, None, {"__getattr__": counts_lookups}),
    "partial": ("'act', a partial", lambda self, obs: self.act(self.net(obs))),
    "forward hook": ("it has forward hooks", None, hooked("register_forward_hook")),
    "forward pre-hook": ("it has forward hooks", None, hooked("register_forward_pre_hook")),
    "fast path of torch": (
        "it calls __get__",
        lambda self, obs: self.net(self.mix(obs, obs, obs)[0]),
        attribute("mix", lambda: nn.MultiheadAttention(4, 2)),
    ),
    "refusal caught": ("catches_a_refusal handles exceptions", catches_a_refusal),
    "error caught": (
        "catches_an_error handles exceptions",
        catches_an_error,
        attribute("table", lambda: nn.Embedding(2, 4)),
    ),
    "finally": ("handles exceptions", leaves_by_finally, attribute("table", lambda: nn.Embedding(2, 4))),
    "tuple of its own": (
        "it reads 'by', a Scale that may change",
        lambda self, obs: self.net(obs) * self.by.factor,
        attribute("by", lambda: Scale((1,))),
    ),
    "method of another object": (
        "it reads 'act', a method that may change",
        lambda self, obs: self.act(self.net(obs)),
        attribute("act", lambda: Shifted(1).add),
    ),
    "method of a dict": ("'get_setting', which may change", lambda self, obs: self.net(obs) * get_setting("scale")),
    "data": ("loads 'data'", lambda self, obs: self.net(obs) * self.head.bias.data),
    "traced": ("it reads 'forward', a ScriptMethod that may change", None, scripted),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_may_be_otherwise_at_another_call_is_done_as_it_is(kind: str) -> None:
    told, *parts = KEPT[kind]
    env = Nested if kind == "nested batch" else Drawing
    (ours, explained), (theirs, _) = (columns_of(made(*parts), flat, env) for flat in (None, False))
    assert ours == theirs
    assert re.search(f"{FLAT[:12]} not flat: .*{re.escape(told)}", explained), explained


def test_a_hook_on_all_modules_is_called() -> None:
    calls = []
    for flat in (None, False):
        hook = nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
        try:
            _, explained = columns_of(made(), flat)
        finally:
            hook.remove()
        assert flat is False or "not flat: it has forward hooks" in explained
    assert len(calls) % 2 == 0
    assert calls


# What is replayed


class Split(RLModule):
    """An encoder of its own class, which others share, and a deviation that is a parameter alone."""

    def setup(self) -> None:
        torch.manual_seed(0)
        self.encoder, self.heads = Encoder(), nn.ModuleDict({"pi": nn.Linear(8, 2), "vf": nn.Linear(8, 1)})
        self.temperature = nn.Parameter(torch.ones(()))
        self.clip = 5.0

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """With Columns, an output that is filled step by step, and one tensor twice."""
        encoded = self.encoder(batch[Columns.OBS])
        outputs = {}
        outputs[Columns.ACTION_DIST_INPUTS] = self.heads["pi"](encoded).clamp(-self.clip, self.clip) / self.temperature
        values = self.heads["vf"](encoded)
        if values.shape[1] != 1:
            raise ValueError("expected one value")
        outputs[Columns.VF_PREDS] = values.squeeze(-1)
        outputs["features"] = {"encoded": encoded, "again": encoded, "part": encoded[:, :2]}
        return outputs


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8)])
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = functional.relu(layer(x))
            if number == 0:
                x = self.norm(x)
        return x


class Recurrent(RLModule):
    kind: Any = nn.LSTM

    def setup(self) -> None:
        torch.manual_seed(0)
        self.core, self.head = self.kind(4, 8, batch_first=True), nn.Linear(8, 2)

    def get_initial_state(self) -> Any:
        return {name: np.zeros(8, np.float32) for name in ("h", "c")[: 2 if self.kind is nn.LSTM else 1]}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        state = tuple(part[None] for part in batch["state_in"].values())
        out, new = self.core(batch["obs"], state if len(state) == 2 else state[0])
        new = new if isinstance(new, tuple) else (new,)
        names = list(batch["state_in"])
        return {"action_dist_inputs": self.head(out), "state_out": {names[i]: part[0] for i, part in enumerate(new)}}


class Gru(Recurrent):
    kind = nn.GRU


def shaped_in_python(self: Any, obs: Any) -> Any:
    count, width = obs.shape
    rows = obs.reshape(count * 2, width // 2).reshape(count, -1) + torch.arange(count)[:, None] + torch.zeros(count, 4)
    return self.net(rows[:count])


def by_functions(self: Any, obs: Any) -> Any:
    hidden = functional.linear(obs, self.body.weight, self.body.bias)
    return functional.linear(torch.tanh_(hidden), self.head.weight) * math.sqrt(2.0)


def of_several_parts(self: Any, obs: Any) -> Any:
    parts = [self.net(each + number) for number, each in enumerate([obs, -obs])]
    return torch.stack([part.max(dim=-1, keepdim=True)[0] for part in parts]).sum(0) + sum(parts)


def masked(self: Any, obs: Any) -> Any:
    logits = self.net(obs)
    return torch.where(obs[:, :2] > 1.5, logits.masked_fill(obs[:, 2:] > 1, -9.0), logits)


@torch.no_grad()
def without_gradients(self: Any, obs: Any) -> Any:
    with torch.no_grad():
        return self.net(obs)


def repeated() -> Callable[[Tensor, int], Tensor]:
    def again(x: Tensor, count: int) -> Tensor:
        return x if count == 0 else again(torch.tanh(x), count - 1)

    return again


IMAGES = nn.Unflatten(-1, (1, 2, 2)), nn.Conv2d(1, 8, 2), nn.ReLU(inplace=True), nn.Flatten()
REPLAYED: dict[str, Any] = {
    "mlp": (),
    "split": lambda: Split(BOX, TWO),
    "lstm": lambda: Recurrent(BOX, TWO),
    "gru": lambda: Gru(BOX, TWO),
    "convolution": (None, attribute("body", lambda: nn.Sequential(*IMAGES))),
    "norm of batches": (
        lambda self, obs: self.net(obs - self.mean),
        attribute("body", lambda: nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))),
    ),
    "dropout": (None, with_noise),
    "parametrization": (None, attribute("body", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)))),
    "shapes": (shaped_in_python,),
    "one hot": (
        lambda self, obs: functional.one_hot(obs[:, :2].argmax(-1), num_classes=2).float() + self.net(obs).softmax(-1),
    ),
    "functions": (by_functions,),
    "parts": (of_several_parts,),
    "masked": (masked,),
    "sorted": (lambda self, obs: self.net(obs).sort(-1)[0],),
    "rows by elements": (lambda self, obs: self.net(obs) + obs[obs > 1.5].sum(),),
    "dict": (lambda self, obs: self.net(torch.cat([obs["a"], obs["b"]["c"]], -1)),),
    "no_grad": (without_gradients,),
    "training": (lambda self, obs: self.net(obs) if not self.training else self.net(-obs),),
    "constants": (lambda self, obs: self.net(obs * self.scale - self.threshold),),
    "lambda": (lambda self, obs: self.act(self.net(obs)), attribute("act", lambda: lambda x: torch.relu(x) + 1)),
    "recursion": (lambda self, obs: self.again(self.net(obs), 2), attribute("again", repeated)),
    "dtype of a weight": (lambda self, obs: self.net(obs.to(self.head.weight.dtype)),),
    "function of torch": (lambda self, obs: self.act(self.net(obs)), attribute("act", lambda: torch.tanh)),
    "tensor": (lambda self, obs: self.net(obs * self.by), attribute("by", lambda: torch.full((4,), 2.0))),
}


@pytest.mark.parametrize("kind", REPLAYED)
def test_what_does_the_same_at_every_call_is_replayed(kind: str) -> None:
    parts, env = REPLAYED[kind], Nested if kind == "dict" else Drawing
    modules = (parts() if callable(parts) else made(*parts) for _ in range(2))
    (ours, explained), (theirs, _) = (columns_of(next(modules), flat, env) for flat in (None, False))
    assert ours == theirs
    assert f"{FLAT}, inline" in explained, explained


def test_agents_modules_are_replayed_or_not_each_by_itself() -> None:
    """One that does the same at every call, and one that counts its calls."""
    found = []
    for flat in (None, False):
        torch.manual_seed(0)
        acts: Any = {"module": {"same": made(), "counts": made(counts_on_itself)}, "forward": Forward(flat=flat)}
        acts["agent_to_module_mapping_fn"] = lambda agent, episode: agent
        options: Any = {"num_envs": 2, "fragment_length": 50, "num_fragments": 8, "seed": 3, **acts}
        with MultiAgentRollout(lambda: Together({"same": Drawing(), "counts": Drawing()}), **options) as rollout:
            parts = [part for each in rollout.fragments() for part in each.by_module().values()]
            columns = [part.column(name) for part in parts for name in part.columns]
            found.append([leaf.tobytes() for column in columns for leaf in leaves_of(column)])
            explained = str(rollout.explain())
        ways = f"'same' {FLAT}, 'counts' forward pass not flat: counts_on_itself stores 'calls', inline"
        assert flat is False or ways in explained, explained
    assert found[0] == found[1]


# What is replayed until it changes


def moved(x: Tensor) -> Tensor:
    return x + 1


def changing() -> Own:
    """A module that reads all that may change."""

    def act(x: Tensor) -> Tensor:
        return x * 2

    def switch() -> None:
        nonlocal act
        act = moved

    def logits(self: Any, obs: Any, factor: float = 1.5, *, more: float = 0.5) -> Any:
        x = self.net(moved((obs - self.mean).to(self.mean.dtype))) * self.scale + self.threshold
        for number, layer in enumerate(self.parts.values()):
            x = layer(x) * (number + 1)
        logits = act(self.turned(x)) * factor + more * self.half
        return -logits if self.training else logits

    methods = {"switch": staticmethod(switch), "turned": staticmethod(lambda x: x.flip(-1))}
    return made(logits, with_all_kinds, {**methods, "half": property(lambda self: 0.5)})


class Doubled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def with_all_kinds(self: Any) -> None:
    self.body = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.1))
    self.parts = nn.ModuleDict({"a": type("Twice", (Doubled,), {})(), "b": nn.Tanh()})


def in_class(name: str, value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(type(module), name, value)


def in_function(name: str, value: Any) -> Callable[[Any], None]:
    return lambda module: setattr(type(module).logits, name, value)


def negated(self: Any, obs: Any) -> Any:
    return self.net(-obs)


def of_another_class(module: Any) -> None:
    module.__class__ = type("Other", (type(module),), {"logits": negated})


def reordered(module: Any) -> None:
    module.parts["a"] = module.parts.pop("a")


def with_other_code(module: Any) -> None:
    type(module).turned.__code__ = (lambda x: -x).__code__


class Changing(ConnectorV2):
    """Changes the acting module at one vector step."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.change, self.calls = change, 0

    def __call__(self, *, rl_module: Any, batch: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 100:
            self.change(rl_module)
        return batch


CHANGES: dict[str, Callable[[Any], Any]] = {
    "attribute": attribute("threshold", lambda: -0.7),
    "attribute over that of the class": attribute("scale", lambda: 2.0),
    "class": lambda module: setattr(type(module), "scale", 2.0),
    "method": attribute("net", lambda: lambda x: x[:, :2]),
    "method of the class": in_class("logits", negated),
    "method over that of a base": in_class("net", lambda self, x: x[:, :2]),
    "static method of the class": in_class("turned", staticmethod(torch.neg)),
    "property of the class": in_class("half", property(lambda self: -3.0)),
    "another class": of_another_class,
    "pass of a layer's class": lambda module: setattr(type(module.parts["a"]), "forward", lambda self, x: -x),
    "code": with_other_code,
    "default value": in_function("__defaults__", (-3.0,)),
    "default value of a keyword": in_function("__kwdefaults__", {"more": -3.0}),
    "function around": lambda module: module.switch(),
    "order of layers": reordered,
    "function": lambda module: globals().update(moved=torch.sigmoid),
    "buffer": attribute("mean", lambda: torch.ones(4)),
    "training": lambda module: module.train(),
    "dtype": lambda module: module.double(),
    "parameter": lambda module: setattr(module.head, "bias", nn.Parameter(torch.ones(2))),
    "layer": lambda module: setattr(module, "head", nn.AdaptiveAvgPool1d(2)),
    "layer within": lambda module: module.body.__setitem__(1, nn.Tanh()),
    "layer more": lambda module: module.body.append(nn.Tanh()),
    "setting of a layer": lambda module: setattr(module.body[1], "negative_slope", 0.7),
    "pass of a layer": lambda module: setattr(module.body[1], "forward", torch.tanh),
    "hook": lambda module: module.body.register_forward_hook(lambda module, args, output: output + 1),
    "pre-hook": lambda module: module.body.register_forward_pre_hook(lambda module, args: (args[0] + 1,)),
}


@pytest.mark.parametrize("kind", [None, *CHANGES])
def test_a_change_of_what_passes_read_ends_replays(kind: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for flat in (None, False):
        with monkeypatch.context() as patch:
            patch.setitem(globals(), "moved", moved)
            change = (lambda module: None) if kind is None else CHANGES[kind]
            piece = {"env_to_module_connector": lambda env, change=change: Changing(change)}
            found.append(columns_of(changing(), flat, publishes=False, **piece))
    (ours, explained), (theirs, _) = found
    assert ours == theirs
    assert (f"{FLAT}, inline" if kind is None else "not flat: what its passes read has changed") in explained
