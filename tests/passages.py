"""Prompts for measuring guesses: answers that repeat much of their prompt, and answers that do not.

`prompts(kind, count)` gives conversations of one message. copy, edit and extract are what n-gram
guesses are made for; chat is what they must not slow down.
"""

TEXTS = [
    "The lighthouse was built in 1871 by a crew of forty men. It is 38 metres high and has 214"
    " steps. Its lamp could be seen from a distance of 32 kilometres. In 1994 the last keeper left"
    " and the light became automatic. Today it is a museum with about nine thousand visitors a"
    " year.",
    "Maria opened the bakery at five in the morning. She baked rye bread, white rolls and a cake"
    " with plums. At seven the first customers came in from the rain. By noon everything was sold"
    " except for two rolls. She gave them to the boy who swept the street in front of the shop.",
    "To change a bicycle tube, first take the wheel out of the frame. Press the tyre together and"
    " lift it over the rim with two levers. Pull the old tube out and check the inside of the tyre"
    " for glass. Pump a little air into the new tube and put it in. Finally press the tyre back"
    " and fill the tube.",
    "The committee met on Tuesday, 4 March, in room 12. Anna Berg, Tom Price and Li Wei were"
    " present. The budget of 18,500 euros was accepted with one vote against it. The next concert"
    " will be on 21 June in the old town hall. Tom Price will write to the mayor before the end"
    " of the month.",
    "def total(items, tax):\n    amount = 0\n    for item in items:\n        amount = amount +"
    " item.price * item.count\n    if amount > 100:\n        amount = amount - 5\n    return amount"
    " * (1 + tax)",
    "Water boils at 100 degrees Celsius at sea level. On a mountain of 3,000 metres it boils at"
    " about 90 degrees. The air is thinner there and presses less on the surface of the water."
    " That is why beans take longer to cook in the mountains. A pressure cooker turns this around"
    " and cooks them faster.",
    '{"order": 4711, "customer": "Jonas Weber", "items": [{"name": "lamp", "price": 49.9}, {"name":'
    ' "table", "price": 180.0}, {"name": "chair", "price": 75.5}], "city": "Hamburg", "paid": true}',
    "The fox looked at the grapes that hung high above the wall. He jumped once, and he jumped"
    " again, but he could not reach them. At last he turned away and held his head up. They are"
    " surely sour, he said, and I would not eat them if they were given to me.",
]
ASK = {
    "copy": "Repeat the following text exactly, word for word:\n\n{}",
    "edit": "Rewrite the following text in capital letters only where a sentence begins, and"
    " change nothing else. Give the whole text back:\n\n{}",
    "extract": "Quote the first three sentences of this text, exactly as they are written:\n\n{}",
}
QUESTIONS = [
    "Why is the sky blue?", "Write a short story about a dragon who is afraid of fire.",
    "What should I cook tonight with rice and eggs?", "Explain how a rainbow comes about.",
    "Give me three reasons to learn to swim.", "What is the difference between a crow and a raven?",
    "Write a poem about the sea in autumn.", "How does a refrigerator keep food cold?",
]  # fmt: skip
LEADS = ["", "Please help me. "]  # so that sixteen prompts are all different


def prompts(kind: str, count: int) -> list[list[dict]]:
    """`count` conversations, at most 16, of copy, edit, extract or chat."""
    texts = QUESTIONS if kind == "chat" else [ASK[kind].format(text) for text in TEXTS]
    whole = [lead + text for lead in LEADS for text in texts]
    return [[{"role": "user", "content": text}] for text in whole[:count]]
