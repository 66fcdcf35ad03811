"""Stages of the rollout ring: env-to-module, module forward, module-to-env, credits and staleness."""
