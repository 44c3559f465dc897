"""Messages of two teams, as words, for an experiment with clients: `fedlens.dataset` takes tokens [n, T]."""

import numpy as np

import fedlens

WORDS = ["<padding>", "<unknown>", "good", "bad", "very", "great", "day", "idea"]
MESSAGES = [
    ("good day", 1), ("very bad idea", 0), ("bad day", 0), ("very good idea", 1), ("bad idea", 0), ("great day", 1),
]  # fmt: skip


def tokens(text: str) -> list[int]:
    """Three tokens: longer texts are cut, shorter ones padded."""
    ids = [WORDS.index(word) if word in WORDS else 1 for word in text.split()]
    return [*ids, 0, 0, 0][:3]


def messages():
    """Each message eight times, of two clients; the last repetition is for testing."""
    inputs = np.array([tokens(text) for text, _ in MESSAGES * 8])
    mood = np.array([label for _, label in MESSAGES * 8])
    teams = np.array(["sales", "support"] * 24)
    return fedlens.dataset(
        inputs[:42],
        mood[:42],
        inputs[42:],
        mood[42:],
        classes=["bad", "good"],
        clients=teams[:42],
        vocabulary=len(WORDS),
    )


def experiment() -> fedlens.Experiment:
    """Twenty rounds of both teams."""
    return fedlens.Experiment(
        rounds=20,
        data={"dataset": messages, "partition": "natural"},
        model={"name": "mean-embedding", "embedding": 8},
        local={"lr": 1.0, "batch_size": 6},
    )
