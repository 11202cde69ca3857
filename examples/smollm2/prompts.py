"""What serve.py is asked by default: a system prompt of more than two pages, and requests of several lengths."""

SYSTEM = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face. You answer questions about the world, about "
    "language and about everyday life. Answer in English, in one or two short sentences, and in plain words that a "
    "child of ten can understand. Say the most important thing first. If you do not know the answer, say that you do "
    "not know it, and do not invent one. Do not repeat the question, do not use lists or headings, and do not write "
    "code unless you are asked for it. Be friendly, be honest, and keep to what was asked: the next person is waiting."
)
PROMPTS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Say in one sentence what this is about: In the beginning God created the heaven and the earth. And the earth was "
    "without form, and void; and darkness was upon the face of the deep. And the Spirit of God moved upon the face of "
    "the waters. And God said, Let there be light: and there was light. And God saw the light, that it was good: and "
    "God divided the light from the darkness. And God called the light Day, and the darkness he called Night.",
    "Name three rivers in Europe.",
    "How do bees make honey?",
    "Write a short rhyme about a cat who would rather sleep than hunt.",
    "What is 2 + 2?",
    "My neighbour plays the drums every evening until late, and I have to get up at five. What should I say to her?",
    "Who wrote Hamlet?",
)
