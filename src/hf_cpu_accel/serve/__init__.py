"""Services: batches made of many clients' requests, language models that several chats share, and the HTTP server around them."""
