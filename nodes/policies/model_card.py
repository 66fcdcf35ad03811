"""Model card: what a saved policy is, in Markdown, for those who find its folder."""

from collections.abc import Mapping
from typing import Any

_ADVICE = """```python
from rollflow.policy import Policy

policy = Policy.load("PATH")
action = policy.act(observation)
```"""


def card_of(policy: Any, manifest: Mapping[str, Any]) -> str:
    """The text of `README.md` beside a policy's manifest."""
    module = policy.module
    weights = sum(value.numel() for value in module.state_dict().values() if hasattr(value, "numel"))
    rows = {
        "Observations": policy.observation_space,
        "Actions": policy.action_space,
        "Module": f"{manifest['module']['name']}, {weights} weights",
        "Sampled": "yes" if policy.explore else "no, the likeliest action is taken",
        "Before the module": ", ".join(policy.env_to_module.names),
        "After the module": ", ".join(policy.module_to_env.names),
        **{f"Trained on: {name}": value for name, value in policy.trained_on.items()},
        "Versions": ", ".join(f"{name} {version}" for name, version in manifest["versions"].items()),
        "Format": manifest["format"],
    }
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items())
    return f"# A policy saved by rollflow\n\n| | |\n| --- | --- |\n{table}\n\n{_ADVICE}\n"


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")
