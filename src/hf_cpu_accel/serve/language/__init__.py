"""Language models in service: prompts in, text out as it is generated, by an engine that many chats share."""
