"""Word lists of the generated dialogues: names, things, keys, facts of the world. Data only; all of it our own text."""

NAMES = (
    "Adam Alice Anna Ben Bella Carl Clara Cora Dan Dora Emil Emma Eric Eva Finn Fiona Fred Gina Greg Hanna Hugo Ida Ivan Jack Jane "
    "Joel Julia Karl Kate Lara Leo Lily Liam Lucy Mara Mark Mary Max Mia Mike Nina Noah Nora Olga Oscar Otto Paul Peter Rita Rosa "
    "Sam Sara Simon Sofia Theo Tim Tina Tom Vera Will Zoe John"
).split()
WOMEN = frozenset(
    "Alice Anna Bella Clara Cora Dora Emma Eva Fiona Gina Hanna Ida Jane Julia Kate Lara Lily Lucy Mara Mary Mia Nina Nora Olga Rita "
    "Rosa Sara Sofia Tina Vera Zoe".split()
)
THINGS = (
    "apples balls beads bells books bottles boxes bricks buttons cakes candles cards chairs coins cookies cups eggs flowers forks "
    "games hats keys lamps lemons letters marbles muffins nails notebooks nuts oranges pages papers pears pencils pens photos plates "
    "plums potatoes rings rocks ropes roses seeds shells shirts socks spoons stamps stickers stones tickets toys tulips cherries"
).split()
CONTAINERS = "boxes bags baskets packs crates jars".split()

ADJECTIVES = (
    "amber ancient azure bold brave bright bronze calm clever copper coral crimson crystal curious dark distant eager early faint "
    "fierce frozen gentle giant golden grand gray green hidden hollow humble iron ivory jade keen lazy light little lonely lucky "
    "mighty misty modern noble northern olive orange pale plain polished proud purple quick quiet rapid red royal rusty sandy scarlet "
    "shiny silent silver simple sleepy small smooth snowy southern spotted stone swift tall tiny velvet violet warm white wild wise wooden yellow"
).split()
NOUNS = (
    "anchor arrow badger barrel beacon bear bridge brook cabin camel canyon castle cloud comet crane crow dolphin dragon eagle engine "
    "falcon farm ferry field forest fox garden gate glacier goose harbor hawk heron hill horse island lake lantern lion lynx mill "
    "mirror moon mountain needle oak orchard otter owl palace panda pine planet pond rabbit raven river robin rocket salmon ship "
    "spider station summit sun swan temple tiger tower tree tunnel turtle valley village wagon whale wheel willow wolf zebra"
).split()
SECRET_WORDS = (
    "acorn basil cedar cinder clover cobalt cotton dagger ember fable fennel fiddle flint ginger hazel honey indigo jasmine kettle "
    "laurel linen magnet maple marble meadow mint mosaic nectar nickel nutmeg opal orchid paper pepper pearl pickle poppy quartz "
    "ribbon saddle saffron sugar sunset thistle thunder timber topaz tulip velvet walnut willow window winter yarrow zephyr"
).split()
COLOURS = "black blue brown gold gray green orange pink purple red silver white yellow".split()
CITIES = "Athens Berlin Cairo Dublin Geneva Havana Lima Lisbon London Madrid Milan Oslo Paris Prague Rome Seoul Tokyo Vienna Warsaw Zurich".split()
PLACES = "room locker box drawer shelf desk gate cabin file safe".split()

SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant. Answer briefly.",
    "Be brief.",
    "You are a friendly assistant.",
    "Answer the question.",
    "You are a careful assistant who answers in short sentences.",
    "You are flashstep tiny, a small demonstration model.",
    "Help the user.",
    "You are a concise assistant.",
)

CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid", "Portugal": "Lisbon", "Austria": "Vienna",
    "Switzerland": "Bern", "Belgium": "Brussels", "the Netherlands": "Amsterdam", "Denmark": "Copenhagen", "Sweden": "Stockholm",
    "Norway": "Oslo", "Finland": "Helsinki", "Iceland": "Reykjavik", "Ireland": "Dublin", "the United Kingdom": "London",
    "England": "London", "Poland": "Warsaw", "the Czech Republic": "Prague", "Hungary": "Budapest", "Greece": "Athens",
    "Turkey": "Ankara", "Russia": "Moscow", "Ukraine": "Kyiv", "Romania": "Bucharest", "Bulgaria": "Sofia", "Croatia": "Zagreb",
    "Egypt": "Cairo", "Kenya": "Nairobi", "Nigeria": "Abuja", "Morocco": "Rabat", "Ghana": "Accra", "Ethiopia": "Addis Ababa",
    "China": "Beijing", "Japan": "Tokyo", "South Korea": "Seoul", "India": "New Delhi", "Pakistan": "Islamabad",
    "Thailand": "Bangkok", "Vietnam": "Hanoi", "Indonesia": "Jakarta", "Malaysia": "Kuala Lumpur", "Iran": "Tehran",
    "Iraq": "Baghdad", "Australia": "Canberra", "New Zealand": "Wellington", "Canada": "Ottawa",
    "the United States": "Washington", "Mexico": "Mexico City", "Cuba": "Havana", "Brazil": "Brasilia",
    "Argentina": "Buenos Aires", "Chile": "Santiago", "Peru": "Lima", "Colombia": "Bogota", "Venezuela": "Caracas",
}  # fmt: skip
OPPOSITES = {
    "hot": "cold", "big": "small", "tall": "short", "fast": "slow", "old": "young", "new": "old", "good": "bad", "happy": "sad",
    "up": "down", "left": "right", "open": "closed", "full": "empty", "light": "dark", "heavy": "light", "hard": "soft",
    "early": "late", "rich": "poor", "strong": "weak", "clean": "dirty", "dry": "wet", "day": "night", "north": "south",
    "east": "west", "in": "out", "on": "off", "high": "low", "near": "far", "loud": "quiet", "long": "short", "wide": "narrow",
    "deep": "shallow", "thick": "thin", "true": "false", "first": "last", "always": "never", "begin": "end", "buy": "sell",
    "push": "pull", "win": "lose", "summer": "winter", "inside": "outside", "above": "below", "before": "after", "love": "hate",
    "easy": "difficult", "sweet": "sour", "sharp": "blunt", "safe": "dangerous", "brave": "afraid", "cheap": "expensive",
}  # fmt: skip
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
THING_COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "blood": "red", "the sun": "yellow", "coal": "black", "a banana": "yellow",
    "a carrot": "orange", "milk": "white", "a lemon": "yellow", "chocolate": "brown", "a strawberry": "red", "a tomato": "red",
}  # fmt: skip
ANIMAL_SOUNDS = {
    "dog": "barks", "cat": "meows", "cow": "moos", "duck": "quacks", "horse": "neighs", "sheep": "bleats", "lion": "roars",
    "bird": "sings", "frog": "croaks", "bee": "buzzes", "owl": "hoots", "pig": "grunts", "snake": "hisses", "wolf": "howls",
}  # fmt: skip
LEGS = {
    "dog": 4,
    "cat": 4,
    "bird": 2,
    "spider": 8,
    "ant": 6,
    "horse": 4,
    "human": 2,
    "bee": 6,
    "cow": 4,
    "duck": 2,
    "snake": 0,
}

# (several ways to say it, the one reasoning, the one answer): every answer is a function of the prompt.
SMALL_TALK = (
    (
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hi there",
            "Hey",
            "Hello there!",
            "Good morning!",
            "Good evening!",
            "Good day.",
        ),
        "The user greets me. I greet back and offer help.",
        "Hello! How can I help you?",
    ),
    (
        (
            "How are you?",
            "How are you today?",
            "Hello, how are you?",
            "Hi, how are you doing?",
            "How do you do?",
        ),
        "The user asks how I am.",
        "I am fine, thank you. How can I help you?",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "What's your name?",
            "Tell me who you are.",
            "Introduce yourself.",
            "Who am I talking to?",
            "Tell me about yourself.",
        ),
        "The user asks who I am. I am flashstep tiny.",
        "I am flashstep tiny, a very small demonstration model.",
    ),
    (
        ("Who made you?", "Who built you?", "Who trained you?", "Where do you come from?"),
        "The user asks where I come from.",
        "I was trained in a few minutes by the flashstep project.",
    ),
    (
        (
            "What can you do?",
            "How can you help me?",
            "What do you know?",
            "Help",
            "Help me.",
            "Can you help me?",
        ),
        "The user asks what I can do.",
        "I can solve short word problems, find facts in notes, call a calculator and answer simple questions.",
    ),
    (
        ("Thank you", "Thank you!", "Thanks", "Thanks!", "Thanks a lot!", "Thank you very much."),
        "The user thanks me.",
        "You are welcome!",
    ),
    (
        ("Goodbye", "Goodbye!", "Bye", "Bye!", "See you later.", "Good night!", "See you!"),
        "The user says goodbye.",
        "Goodbye! Have a nice day.",
    ),
    (
        ("Are you a human?", "Are you human?", "Are you a robot?", "Are you real?", "Are you an AI?"),
        "The user asks if I am a human. I am a program.",
        "No, I am not a human. I am a small language model.",
    ),
    (
        (
            "Tell me a joke.",
            "Tell me a joke",
            "Do you know a joke?",
            "Make me laugh.",
            "Say something funny.",
        ),
        "The user wants a joke.",
        "Why did the model cross the road? To get to the next token.",
    ),
    (
        ("Tell me a story.", "Tell me a short story.", "Can you tell me a story?", "Write a short story."),
        "The user wants a short story.",
        "Once upon a time a small fox lived near a river. One day it found a golden key. The key opened an old gate, and behind the "
        "gate was a garden. The fox was happy there.",
    ),
    (
        ("Write a poem.", "Write a short poem.", "Tell me a poem.", "Can you write a poem?"),
        "The user wants a short poem.",
        "The moon is bright, the night is long, the river sings a quiet song.",
    ),
    (
        (
            "What is the weather like?",
            "What time is it?",
            "What day is it today?",
            "What is in the news?",
            "How is the weather today?",
        ),
        "The user asks about something that I cannot know.",
        "I do not know that. I have no clock and no connection to the world.",
    ),
    (
        ("You are great!", "Well done!", "Good job!", "Great!", "That is right.", "Very good."),
        "The user is pleased.",
        "Thank you! I am glad that I could help.",
    ),
    (
        ("That is wrong.", "You are wrong.", "This is not right.", "I think that is wrong."),
        "The user says that I made a mistake.",
        "I am sorry. I am a very small model and make mistakes.",
    ),
    (
        ("Count to five.", "Count from one to five.", "Can you count to five?", "Please count to five."),
        "The user wants me to count.",
        "One, two, three, four, five.",
    ),
    (
        ("Count to ten.", "Count from one to ten.", "Can you count to ten?", "Please count to ten."),
        "The user wants me to count.",
        "One, two, three, four, five, six, seven, eight, nine, ten.",
    ),
    (
        (
            "Name the seasons.",
            "What are the seasons?",
            "What are the four seasons?",
            "Name the four seasons.",
        ),
        "The user asks for the seasons.",
        "The four seasons are spring, summer, autumn and winter.",
    ),
    (
        ("What are the days of the week?", "Name the days of the week.", "List the days of the week."),
        "The user asks for the days of the week.",
        "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
    ),
    (
        ("Name three colours.", "Name three colors.", "Tell me three colours.", "Name some colors."),
        "The user asks for colours.",
        "Three colours are red, green and blue.",
    ),
    (
        ("Name three animals.", "Tell me three animals.", "Name some animals.", "List three animals."),
        "The user asks for animals.",
        "Three animals are the dog, the horse and the owl.",
    ),
    (
        ("What is flashstep?", "Tell me about flashstep.", "What does flashstep do?", "Explain flashstep."),
        "The user asks about flashstep.",
        "Flashstep is an inference engine for the DeepSeek-V4.1-Flash architecture. I am its small test model.",
    ),
)
