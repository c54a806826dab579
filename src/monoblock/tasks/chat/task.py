"""Chat: answer as the assistant in conversations."""

from __future__ import annotations

from monoblock.tasks.task import Task, TrainingDefaults, imported

CHAT = Task(
    name="chat",
    about="answer as the assistant in conversations",
    build_data=imported("chat.data", "build_chat_data"),
    corpus_kinds=("chat",),
    special_tokens=lambda recipe, train: ["pad", "eos"],
    evaluate=imported("chat.evaluate", "evaluate_chat"),
    metrics=("loss", "perplexity"),
    decoding="sampling",
    verb="chat",
    defaults=TrainingDefaults(3, 8, 1024),
)
