"""A policy of CartPole, adapted to a newer one, bootstraps an LSTM policy there, which is then served to clients."""

import json
import tempfile
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import adapt_policy as old
import numpy as np
import torch

from rollflow import DefaultModelConfig, Policy
from rollflow.nodes import DefaultModule
from rollflow.policy.serving import HttpServer, Shelf

LESSONS, UPDATES, STEPS, ROWS, CLIENTS, LEARNING_RATE = 20, 300, 48, 32, 4, 3e-3
CONFIG = DefaultModelConfig(fcnet_hiddens=(32,), use_lstm=True, lstm_cell_size=32)


def lessons(module: Any) -> list[tuple[Any, Any]]:
    """Observations f32[T, 6] and actions i64[T, 2] of each episode that the adapted policy plays."""
    env = old.NewCartPole()
    policy = old.adapted(module, env)
    episodes = []
    for number in range(LESSONS):
        (observation, _), seen, chosen, done = env.reset(seed=number), list[Any](), list[Any](), False
        policy.reset()
        while not done:
            action = policy.act(observation)
            seen.append(observation)
            chosen.append(action)
            observation, _, terminated, truncated, _ = env.step(action)
            done = terminated or truncated
        episodes.append((np.array(seen, np.float32), np.array(chosen, np.int64)))
    return episodes


def bootstrapped(episodes: list[tuple[Any, Any]], seed: int) -> DefaultModule:
    """A recurrent module of the newer environment that has learnt, from parts of the episodes, to do as they do."""
    module = DefaultModule(old.NewCartPole.observation_space, old.NewCartPole.action_space, model_config=CONFIG)
    optimizer, rng = torch.optim.Adam(module.parameters(), lr=LEARNING_RATE), np.random.default_rng(seed)
    long = [each for each in episodes if len(each[0]) >= STEPS] or episodes
    length = min(STEPS, *(len(seen) for seen, _ in long), STEPS)
    state = {name: part.expand(ROWS, -1) for name, part in module.get_initial_state().items()}
    for _ in range(UPDATES):
        picked = [long[number] for number in rng.integers(len(long), size=ROWS)]
        starts = [int(rng.integers(len(seen) - length + 1)) for seen, _ in picked]
        seen, chosen = (
            torch.from_numpy(np.stack([each[part][at : at + length] for each, at in zip(picked, starts, strict=True)]))
            for part in (0, 1)
        )
        output = module.forward_train({"obs": seen, "state_in": state})
        distribution = module.get_train_action_dist_cls().from_logits(output["action_dist_inputs"])
        optimizer.zero_grad()
        (-distribution.logp(chosen).mean()).backward()
        optimizer.step()
    return module


def played(url: str, client: int) -> float:
    """The return of an episode that one of the server's clients plays."""
    env, total, begins, done = old.NewCartPole(), 0.0, True, False
    observation, _ = env.reset(seed=1000 + client)
    while not done:
        question = {"observation": observation.tolist(), "session": f"client {client}", "begins": begins}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/policies/new/act", json.dumps(question).encode(), headers)
        with urllib.request.urlopen(request) as response:
            action = json.load(response)["action"]
        observation, reward, terminated, truncated, _ = env.step(action)
        total, begins, done = total + reward, False, terminated or truncated
    return total


def main(seed: int = 0) -> float:
    """Train the old policy, bootstrap the new one, save and serve it; the mean return of its clients."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    episodes = lessons(old.trained(seed))
    module, env = bootstrapped(episodes, seed), old.NewCartPole()
    spaces: dict[str, Any] = {"observation_space": env.observation_space, "action_space": env.action_space}
    with tempfile.TemporaryDirectory() as folder:
        Policy(module, **spaces).save(f"{folder}/new")
        shelf = Shelf()
        shelf.put("new", Policy.load(f"{folder}/new"), version="1")
        with HttpServer(shelf, "127.0.0.1:0") as server, ThreadPoolExecutor(CLIENTS) as clients:
            returns = list(clients.map(lambda client: played(server.url, client), range(CLIENTS)))
        shelf.close()
    taught = np.mean([len(seen) for seen, _ in episodes])
    print(f"mean return {np.mean(returns):.1f} of {CLIENTS} clients, {taught:.1f} of the adapted policy")
    return float(np.mean(returns))


if __name__ == "__main__":
    main()
