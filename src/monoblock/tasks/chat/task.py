"""Chat: answer as the assistant in conversations."""

from __future__ import annotations

from monoblock.tasks.task import ImportedFunction, Task, TrainingDefaults

CHAT = Task(
    name="chat",
    about="answer as the assistant in conversations",
    build_data=ImportedFunction("chat.data", "build_chat_data"),
    corpus_kinds=("chat",),
    special_tokens=lambda recipe, train: ["pad", "eos"],
    evaluate=ImportedFunction("chat.evaluate", "evaluate_chat"),
    metrics=("loss", "perplexity"),
    decoding="sampling",
    verb="chat",
    defaults=TrainingDefaults(3, 8, 1024),
)
