"""Language models: from prompts to streamed text, with an engine that many chats share."""
