"""Returns of finished episodes: what a glance at them shows."""

from rollflow.nodes import EpisodeReturns, MetricsLogger
from rollflow.nodes.metrics.episode_returns import AgentReturns


def test_returns_say_how_many_episodes_and_their_mean() -> None:
    returns = EpisodeReturns(window=2)
    assert repr(returns) == "<EpisodeReturns: 0 finished episodes>"
    returns.take(3, [10.0, 20.0, 40.0], [1, 2, 4])
    assert repr(returns) == "<EpisodeReturns: 3 finished episodes, mean return 30 of the last 2>"
    assert repr(AgentReturns(lambda module_id: True)) == "<AgentReturns: 0 finished episodes>"


def test_a_logger_names_what_it_has() -> None:
    logger = MetricsLogger()
    assert repr(logger) == "<MetricsLogger: nothing logged>"
    logger.log_value(("train", "loss"), 0.5)
    logger.log_value("steps", 3)
    assert repr(logger) == "<MetricsLogger: steps, train/loss>"
