import hypothesis
import pytest

# How long an example takes says nothing of whether it is right.
hypothesis.settings.register_profile("rollflow", deadline=None)
hypothesis.settings.load_profile("rollflow")


@pytest.fixture(
    params=[
        pytest.param(("asyncio", {"use_uvloop": False}), id="asyncio"),
        pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop"),
        pytest.param(("trio", {}), id="trio"),
    ]
)
def anyio_backend(request: pytest.FixtureRequest) -> object:
    """Every asynchronous test runs on each of these."""
    return request.param
