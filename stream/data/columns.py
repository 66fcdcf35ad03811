"""Names of columns in batches, fragments and episodes."""


class Columns:
    """Column names, as RLlib writes them."""

    OBS = "obs"
    NEXT_OBS = "new_obs"
    INFOS = "infos"
    ACTIONS = "actions"
    ACTIONS_FOR_ENV = "actions_for_env"
    REWARDS = "rewards"
    TERMINATEDS = "terminateds"
    TRUNCATEDS = "truncateds"
    EPS_ID = "eps_id"
    AGENT_ID = "agent_id"
    MODULE_ID = "module_id"
    T = "t"
    STATE_IN = "state_in"
    NEXT_STATE_IN = "next_state_in"
    STATE_OUT = "state_out"
    SEQ_LENS = "seq_lens"
    LOSS_MASK = "loss_mask"
    ACTION_DIST_INPUTS = "action_dist_inputs"
    ACTION_LOGP = "action_logp"
    ACTION_PROB = "action_prob"
    VF_PREDS = "vf_preds"
    ADVANTAGES = "advantages"
    VALUE_TARGETS = "value_targets"
    RETURNS_TO_GO = "returns_to_go"
    N_STEP = "n_step"
    POLICY_VERSION = "policy_version"
    BOOTSTRAP_FROM = "bootstrap_from"


ONE_EACH = frozenset({Columns.VF_PREDS, Columns.ACTION_LOGP})
"""Outputs that are one number for each step."""

RULED_OUT = -1e9
"""A logit of this or less in `action_dist_inputs` rules its Discrete or MultiDiscrete action out."""
