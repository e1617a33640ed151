"""Conversations: sources, chat templates, which tokens are learnt; tokenizers and local model folders."""
