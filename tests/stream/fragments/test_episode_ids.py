"""Ids of a lane's episodes."""

import copy
import hashlib
import pickle

from rollflow.stream.fragments.fragment import EpisodeIds


def test_an_id_is_a_hash_of_lane_slot_and_number() -> None:
    ids = EpisodeIds("0/env/3")
    for slot, number in ((0, 0), (12, 345)):
        assert ids(slot, number) == hashlib.blake2b(f"0/env/3/{slot}/{number}".encode(), digest_size=16).hexdigest()


def test_ids_go_to_other_processes_and_into_copies() -> None:
    ids = EpisodeIds("0/env/3")
    for each in (pickle.loads(pickle.dumps(ids)), copy.deepcopy(ids)):
        assert each == ids
        assert each(5, 6) == ids(5, 6)
