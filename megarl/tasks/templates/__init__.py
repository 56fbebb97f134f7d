"""Conversations as token ids: chat templates, tokenizers, messages between turns."""
