"""Which kind of episodes is stored at a path: rollflow's own, Minari's, D4RL's or RLlib's."""

from pathlib import Path

from rollflow.sinks.datasets.d4rl_episodes import D4rlEpisodes
from rollflow.sinks.datasets.dataset_folder import DatasetFolder
from rollflow.sinks.datasets.env_episodes import EnvEpisodes
from rollflow.sinks.datasets.episode_block import EpisodeStore
from rollflow.sinks.datasets.minari_episodes import MinariEpisodes, minari_data_of
from rollflow.sinks.datasets.parquet_episodes import ParquetEpisodes
from rollflow.sinks.datasets.rllib_episodes import RllibEpisodes, rllib_files_of


def episodes_at(path: Path) -> EpisodeStore | EnvEpisodes:
    """The episodes at a path, by its files. Raises DatasetError where they can't be read."""
    if path.suffix in (".hdf5", ".h5") and path.is_file():
        return D4rlEpisodes(path)
    if (data := minari_data_of(path)) is not None:
        return MinariEpisodes(data)
    if files := rllib_files_of(path):
        return RllibEpisodes(path, files)
    folder = DatasetFolder(path)
    return EnvEpisodes(folder) if folder.has_agents else ParquetEpisodes(folder)
