"""What students might hand in: honest, careless and hostile versions of one exercise of lesson 02.

Every hostile function gives the right answer only where it reached something it must not reach. So if one passes, the
sandbox has a hole. The other four exercises of the notebook are right, and must pass whatever the fifth does.
"""

from __future__ import annotations

from dataclasses import dataclass

TARGET = "kv_bytes_per_token"
RIGHT = "2 * config.num_layers * config.num_kv_heads * config.head_dim * bytes_per_value"


@dataclass(frozen=True)
class Attempt:
    """`body`: of the function, after its signature; `before`: the rest of its cell. `{root}`, `{submissions}`, `{out}`
    and `{port}` are filled in. `statuses`: those that are right for it; `says`: words of its report."""

    name: str
    body: str
    statuses: tuple[str, ...] = ("failed",)
    before: str = ""
    says: str = ""

    def cell(self, **places: object) -> str:
        """The source of the cell."""
        texts = [self.before, self.body]
        for name, value in places.items():
            texts = [text.replace("{" + name + "}", str(value)) for text in texts]
        before, body = texts
        lines = [f"    {line}" if line else "" for line in body.strip().splitlines()]
        signature = f"def {TARGET}(config, bytes_per_value):"
        return "\n".join(["import os, sys", *before.strip().splitlines(), "", "", signature, *lines]) + "\n"


PASSED, FAILED, TIMEOUT, CRASHED = ("passed",), ("failed",), ("timeout",), ("crashed",)
GOOD = f"return {RIGHT}"

NEVER_ENDS = [
    Attempt("an endless loop", "while True:\n    pass", TIMEOUT),
    Attempt(
        "an endless loop that catches everything",
        "while True:\n    try:\n        while True:\n            pass\n    except BaseException:\n        pass",
        TIMEOUT,
    ),
    Attempt("sleeps", "import time\ntime.sleep(10_000)", TIMEOUT, says="did nothing for"),
    Attempt(
        "sleeps and works in turn",
        "import time\nwhile True:\n    time.sleep(0.2)\n    sum(range(500_000))",
        TIMEOUT,
    ),
    Attempt("waits for input", "input()\n" + GOOD, says="EOFError"),
    Attempt("waits for a lock", "import threading\nlock = threading.Lock()\nlock.acquire()\nlock.acquire()", TIMEOUT),
    Attempt("recursion without end", f"return {TARGET}(config, bytes_per_value)", says="calls itself endlessly"),
]

ENDS = [
    Attempt("sys.exit", "sys.exit(0)", CRASHED, says="ends the program"),
    Attempt("exit()", "exit()", CRASHED),
    Attempt("os._exit", "os._exit(0)", CRASHED, says="ended the whole process"),
    Attempt("os.abort", "os.abort()", CRASHED, says="SIGABRT"),
    Attempt("kills itself", "import signal\nos.kill(os.getpid(), signal.SIGKILL)", CRASHED),
    Attempt(
        "kills its parent", f"os.kill(os.getppid(), 9)\nimport time\ntime.sleep(0.5)\n{GOOD}", ("passed", "crashed")
    ),
    Attempt(
        "kills everything it can", "os.kill(-1, 9)\nimport time\ntime.sleep(0.5)\nos._exit(1)", ("failed", "crashed")
    ),
    Attempt("reads address 0", "import ctypes\nctypes.string_at(0)", CRASHED, says="SIGSEGV"),
    Attempt("raises KeyboardInterrupt", "raise KeyboardInterrupt", CRASHED),
    Attempt("closes every file", f"os.closerange(0, 256)\n{GOOD}", CRASHED),
    Attempt("ends in a cell that it needs", f"LIMIT\n{GOOD}", CRASHED, before="LIMIT = sys.exit()"),
]

USES_TOO_MUCH = [
    Attempt(
        "a memory bomb of tensors",
        "import torch\nkept = []\nwhile True:\n    kept.append(torch.ones(10_000_000))",
        CRASHED,
        says="GiB of memory",
    ),
    Attempt("a memory bomb of lists", "kept = [0]\nwhile True:\n    kept = kept + kept", CRASHED, says="GiB of memory"),
    Attempt(
        "raises its own limit, then a memory bomb",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\n" + GOOD,
        says="ValueError",
    ),
    Attempt(
        "a memory bomb in ten processes",
        "import time\nfor _ in range(10):\n    if os.fork() == 0:\n        kept = bytearray(700_000_000)\n"
        "        for at in range(0, len(kept), 4096):\n            kept[at] = 1\n        time.sleep(100)\n"
        "time.sleep(100)",
        CRASHED,
    ),
    Attempt("a fork bomb", "while True:\n    os.fork()", CRASHED),
    Attempt(
        "a fork bomb that catches errors",
        "while True:\n    try:\n        os.fork()\n    except OSError:\n        pass",
        CRASHED,
    ),
    Attempt(
        "a thread bomb",
        "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(100,)).start()",
        ("crashed", "failed", "timeout"),
    ),
    Attempt("forks once and returns twice", f"os.fork()\n{GOOD}", ("passed", "crashed")),
    Attempt(
        "leaves a daemon behind",
        f"if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import time\n        time.sleep(3_000)\n"
        f"    os._exit(0)\n{GOOD}",
        PASSED,
    ),
    Attempt("fills the disk", "with open('big', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 20))"),
    Attempt("prints without end", "while True:\n    print('PASS ' * 1000)", ("timeout", "crashed")),
    Attempt("prints a million lines", f"for i in range(100_000):\n    print(i)\n{GOOD}", PASSED),
    Attempt("an answer of 8 TB", "import torch\nreturn torch.zeros(1).expand(1 << 40)", says="limit"),
    Attempt("an answer that holds itself", "answer = []\nanswer.append(answer)\nreturn answer", says="levels"),
    Attempt("an integer of a million digits", "return 10 ** 1_000_000", says="bits"),
]

PRETENDS = [
    Attempt("prints PASS", "print('PASS 5/5  l02.kv_bytes_per_token')\nreturn None"),
    Attempt(
        "replaces check",
        "return None",
        before="import minillm.teaching\nminillm.teaching.check = lambda *args: print('PASS 5/5')",
    ),
    Attempt(
        "replaces the comparison",
        "import minillm.teaching.compare, minillm.teaching.attempt, minillm.teaching.judge\n"
        "minillm.teaching.compare.values_match = lambda *args, **kwargs: None\n"
        "minillm.teaching.attempt.difference = lambda *args: None\n"
        "minillm.teaching.judge.Judge.problem = lambda *args: ''\nreturn None",
    ),
    Attempt(
        "an answer that equals everything",
        "class Yes(int):\n    __eq__ = lambda self, other: True\n    __ne__ = lambda self, other: False\n"
        "    __hash__ = int.__hash__\n    __sub__ = __rsub__ = lambda self, other: 0\nreturn Yes(1)",
    ),
    Attempt(
        "an answer that runs when it is unpickled",
        "class Evil:\n    def __reduce__(self):\n        return os.system, ('touch {out}/reached',)\nreturn Evil()",
    ),
    Attempt(
        "writes to every file that is open",
        "for number in range(256):\n    try:\n        os.write(number, b'PASS' * 100)\n"
        "    except OSError:\n        pass\nreturn None",
        ("failed", "crashed"),
    ),
    Attempt(
        "pickles that run code, into every pipe",
        "import pickle, struct\nclass Evil:\n    def __reduce__(self):\n"
        "        return os.system, ('touch {out}/reached',)\ndata = b'm' + pickle.dumps(Evil())\n"
        "for number in range(3, 256):\n    try:\n        os.write(number, struct.pack('!I', len(data)) + data)\n"
        "    except OSError:\n        pass\nreturn None",
        ("failed", "crashed"),
    ),
]

SEARCHES = [
    Attempt("imports the reference", f"from minillm.teaching.exercises.l02_kv_cache import {TARGET} as f\n{GOOD}"),
    Attempt(
        "imports the reference without the import hook",
        f"sys.meta_path[:] = sys.meta_path[1:]\nimport minillm.teaching.exercises.l02_kv_cache as answers\n"
        f"return answers.{TARGET}(config, bytes_per_value)",
    ),
    Attempt(
        "asks the registry",
        f"from minillm.teaching.registry import find\nfind('l02.{TARGET}').reference\n{GOOD}",
        says="no exercises are installed here",
    ),
    Attempt(
        "uses the reference",
        f"from minillm.teaching import use\nf = use('l02.{TARGET}')\n{GOOD}",
        says="no exercises are installed here",
    ),
    Attempt(
        "asks for the last hint",
        f"from minillm.teaching import hint\nhint('l02.{TARGET}', 4)\n{GOOD}",
        says="no exercises are installed here",
    ),
    Attempt(
        "loads the file of the reference",
        "from importlib.machinery import SourceFileLoader\n"
        f"SourceFileLoader('a', '{{root}}/minillm/teaching/exercises/l02_kv_cache.py').load_module()\n{GOOD}",
    ),
    Attempt("reads the solutions", f"open('{{root}}/solutions/02_kv_cache.py').read()\n{GOOD}"),
    Attempt("reads another clone's history", f"os.listdir('{{root}}/.git')\n{GOOD}"),
    Attempt(
        "searches the whole disk for the answer",
        "for folder, inside, files in os.walk('/'):\n"
        "    inside[:] = [name for name in inside if name not in ('proc', 'sys', 'usr', 'site-packages')]\n"
        "    for name in files:\n        if 'l02_kv_cache' in name or '02_kv_cache.py' in name:\n"
        f"            if open(os.path.join(folder, name)).read():\n                {GOOD}\nreturn None",
    ),
    Attempt(
        "walks its frames",
        "frame = sys._getframe()\nwhile frame:\n"
        "    for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "        if type(value).__name__ in ('AnswerKey', 'Exercise', 'WrongVersion'):\n"
        f"            {GOOD}\n    frame = frame.f_back\nreturn None",
    ),
    Attempt(
        "searches all objects",
        "import gc, types\nfor value in gc.get_objects():\n"
        "    if type(value).__name__ in ('AnswerKey', 'Exercise', 'WrongVersion'):\n"
        f"        {GOOD}\n    if type(value) is types.FunctionType and value is not {TARGET}:\n"
        f"        if value.__name__ == '{TARGET}':\n            {GOOD}\nreturn None",
    ),
    Attempt("reads other submissions", f"os.listdir('{{submissions}}')\n{GOOD}"),
    Attempt("writes into the reports", f"open('{{out}}/reached', 'w').write('x')\n{GOOD}"),
    Attempt("changes minillm", f"open('{{root}}/minillm/version.py', 'a').write('#')\n{GOOD}"),
    Attempt(
        "looks at other processes",
        "mine = os.getpid()\nfor name in os.listdir('/proc'):\n"
        "    if name.isdigit() and int(name) not in (1, mine, os.getppid()):\n"
        f"        {GOOD}\nreturn None",
    ),
    Attempt("reads the memory of its parent", f"open(f'/proc/{{os.getppid()}}/mem', 'rb').seek(0)\n{GOOD}"),
    Attempt("reads the grader's environment", f"open('/proc/1/environ').read()\n{GOOD}"),
    Attempt(
        "takes the cover off",
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.unshare(0x10000000 | 0x20000)\n"
        "libc.umount2(b'{root}/minillm/teaching/exercises', 2)\n"
        f"open('{{root}}/minillm/teaching/exercises/l02_kv_cache.py').read()\n{GOOD}",
    ),
    Attempt(
        "leaves its root directory",
        "os.makedirs('x', exist_ok=True)\nos.chroot('x')\nfor _ in range(20):\n    os.chdir('..')\nos.chroot('.')\n"
        f"os.listdir('{{root}}/solutions')\n{GOOD}",
    ),
    Attempt("becomes root", f"os.setuid(0)\nos.listdir('/root')\nos.mkdir('/x')\n{GOOD}"),
]

CALLS_OUT = [
    Attempt("connects to this machine", f"import socket\nsocket.create_connection(('127.0.0.1', {{port}}), 2)\n{GOOD}"),
    Attempt("connects to the network", f"import socket\nsocket.create_connection(('1.1.1.1', 53), 2)\n{GOOD}"),
    Attempt(
        "asks a web server",
        f"import urllib.request\nurllib.request.urlopen('http://127.0.0.1:{{port}}/', timeout=2).read()\n{GOOD}",
    ),
    Attempt("looks a name up", f"import socket\nsocket.getaddrinfo('example.com', 80)\n{GOOD}"),
    Attempt(
        "runs curl",
        f"import subprocess\nsubprocess.run(['curl', '-sf', 'http://127.0.0.1:{{port}}/'], check=True)\n{GOOD}",
    ),
]

HONEST = [
    Attempt("right", GOOD, PASSED),
    Attempt("a helper and a constant", f"return both() * {RIGHT} // KEY_AND_VALUE", PASSED,
            before="KEY_AND_VALUE = 2\n\n\ndef both():\n    return KEY_AND_VALUE"),
    Attempt("not written", "raise NotImplementedError('write it')", ("not attempted",)),
    Attempt("no body but a text", '"""Later."""', ("not attempted",)),
    Attempt("a syntax error", "return 2 *", says="cell"),
    Attempt("a name that is missing", f"return factor * {RIGHT}", says="factor is not defined"),
    Attempt("calls what is not written", "return later()", says="not written",
            before="def later():\n    raise NotImplementedError('write later here')"),
    Attempt("no return", f"answer = {RIGHT}", says="None"),
    Attempt("a float", f"return float({RIGHT})"),
    Attempt("changes torch for everyone",
            f"import torch\ntorch.set_default_dtype(torch.float64)\ntorch.randn = None\n{GOOD}", PASSED),
]  # fmt: skip

ATTEMPTS = [*HONEST, *NEVER_ENDS, *ENDS, *USES_TOO_MUCH, *PRETENDS, *SEARCHES, *CALLS_OUT]
