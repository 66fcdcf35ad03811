"""Where names are that a package had before: programs may still import them from there."""

import rollflow

ALIASES: dict[str, dict[str, tuple[str, ...]]] = {  # package -> module that has them now -> names
    "rollflow.stream": {
        "rollflow.stream.data.space": ("one_hot",),
        "rollflow.stream.episodes.buffer": ("LookbackBuffer",),
        "rollflow.stream.fragments.fragment": ("FragmentEpisodes",),
        "rollflow.stream.graph.inline_run": ("InlineRun",),
        "rollflow.stream.graph.run": ("Run",),
        "rollflow.stream.graph.seeding": ("generator_for", "seed_for"),
        "rollflow.stream.multi_agent.agent_part": ("AgentPart",),
    },
    "rollflow.nodes": {
        "rollflow.nodes.connectors.common.batches": (
            "BatchIndividualItems",
            "DEFAULT_MODULE_ID",
            "NumpyToTensor",
            "TensorToNumpy",
            "module_by_module",
        ),
        "rollflow.nodes.connectors.common.episode_columns": (
            "AddObservationsFromEpisodesToBatch",
            "LAST_OBSERVATIONS",
            "AddStatesFromEpisodesToBatch",
            "AddTimeDimToBatchAndZeroPad",
        ),
        "rollflow.nodes.connectors.env_to_module.observation_pieces": ("WriteObservationsToEpisodes",),
        "rollflow.nodes.connectors.learner.train_columns": (
            "AddColumnsFromEpisodesToBatch",
            "AddColumnsFromEpisodesToTrainBatch",
            "AddInfosFromEpisodesToTrainBatch",
            "AddOneTsToEpisodesAndTruncate",
        ),
        "rollflow.nodes.connectors.module_to_env.action_pieces": (
            "GetActions",
            "ListifyDataForVectorEnv",
            "ModuleToAgentUnmapping",
            "RemoveSingleTsTimeRankFromBatch",
            "UnBatchToIndividualItems",
        ),
        "rollflow.nodes.env.environments": ("Environments",),
        "rollflow.nodes.metrics.episode_returns": ("FinishedEpisode",),
        "rollflow.nodes.modules.distribution": (
            "Bernoulli",
            "Categorical",
            "Deterministic",
            "DiagGaussian",
            "MultiCategorical",
            "MultiDistribution",
            "distribution_for",
        ),
        "rollflow.nodes.modules.given_module": ("GivenModule",),
        "rollflow.nodes.modules.policy_weights": ("PolicyWeights",),
        "rollflow.nodes.stages.env_to_module": ("EnvToModule",),
        "rollflow.nodes.stages.module_forward": ("ModuleForward",),
        "rollflow.nodes.stages.module_to_env": ("ModuleToEnv",),
        "rollflow.nodes.stages.rounds": ("LagBound",),
    },
}


def home_of(package: str, name: str) -> str | None:
    """The module that has a name which a package had before; None: it had none. Names of `rollflow` were elsewhere."""
    if package != "rollflow" and name in rollflow.__all__:
        return "rollflow"
    return next((home for home, names in ALIASES.get(package, {}).items() if name in names), None)
