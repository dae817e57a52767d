"""Runs the PTX that Triton compiles for sm_80 and sm_90 on a CPU: the whole grid at once, a numpy lane for each thread,
every address checked.

Program(ptx).launch(grid, warps, arguments, shared) changes the tensors among the arguments in place. It raises Fault at
an access outside of the tensor that its address was made from, at one that is not aligned, at shared memory beyond
`shared` bytes, and at instructions that none of our kernels has there, such as atomics. A tensor ends with its last element:
rows of a slice end where the slice does in the last row only. Shared memory begins as NaN, and is NaN where an asynchronous
copy goes until it has been waited for.

Lanes with the lowest program counter run first, so that those that part meet again and no barrier is passed early.
Formats and fragments: NVIDIA's PTX ISA.
"""

import re

import numpy as np
import torch

TYPES = {
    f"{kind}{8 * size}": np.dtype(f"{code}{size}")
    for size in (1, 2, 4, 8)
    for kind, code in (("s", "i"), ("u", "u"), ("b", "u"))
} | {
    "pred": np.dtype(bool),
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "bf16": np.dtype("u2"),
}
REGION = 36  # bits of an address below the number of its tensor
COMPARE = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
ONE = {
    "ex2": np.exp2,
    "sqrt": np.sqrt,
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
}
TWO = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "div": np.divide,
}
IGNORED = {"bar", "fence"}


class Fault(AssertionError):
    """Something that a GPU would not do, or not rightly."""


def to_bf16(x):
    """fp32 to the bits of bf16, to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return np.where(np.isnan(x), 0x7FC0, bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def parts(vector):
    return [name.strip() for name in vector.strip("<> ").split(",")]


def halves(x):
    """(n,) uint32 -> (n, 2) uint16, the lower first."""
    return np.ascontiguousarray(x).view(np.uint16).reshape(-1, 2)


class Program:
    """A kernel's instructions: (predicate or "", opcode's parts, operands)."""

    def __init__(self, ptx):
        found = re.search(
            r"\.entry\s+(\S+?)\s*\((.*?)\)(.*)", re.sub(r"//[^\n]*", "", ptx), re.DOTALL
        )
        self.name, head, body = found.groups()
        self.parameters = re.findall(r"\.param\s+\.(\w+)[^,]*?(\w+)\s*(?:,|$)", head.strip())
        self.widths = {
            name: TYPES[type] for type, name in re.findall(r"\.reg \.(\w+)\s+(%?\w+)", body)
        }
        self.code = []
        self.labels = {}
        for line in re.sub(
            r"([;{}]|^\s*\$?\w+:)", r"\1\n", self._braces(body), flags=re.MULTILINE
        ).splitlines():
            line = line.strip().rstrip(";").strip()
            if label := re.fullmatch(r"(\$?\w+):", line):
                self.labels[label.group(1)] = len(self.code)
            elif line and line[0] not in ".{})":
                predicate, opcode, operands = re.fullmatch(
                    r"(?:@(!?%?\w+)\s+)?(\S+)\s*(.*)", line
                ).groups()
                operands = re.findall(r"<[^>]*>|\[[^\]]*\]|[^,\s][^,]*", operands)
                self.code.append(
                    (predicate or "", opcode.split("."), [each.strip() for each in operands])
                )

    @staticmethod
    def _braces(body):
        """Vectors {a, b} become <a, b>: what is left in braces are blocks."""
        return re.sub(r"\{([^{};]*)\}", r"<\1>", re.sub(r"\s*\n\s*", "\n", body[body.index("{") :]))

    def launch(self, grid, warps, arguments, shared=0):
        """grid: up to three numbers; arguments: tensors and numbers, without constants; shared: bytes."""
        with np.errstate(all="ignore"):
            return Launch(self, (*grid, 1, 1)[:3], warps, arguments, shared).run()


class Launch:
    """One run: registers as arrays over all threads of the grid."""

    def __init__(self, program, grid, warps, arguments, shared):
        self.program = program
        self.n = int(np.prod(grid)) * warps * 32
        self.block, thread = np.divmod(np.arange(self.n), warps * 32)
        self.lane = thread % 32
        self.special = {"%tid.x": thread, "%laneid": self.lane, "%ntid.x": warps * 32}
        for axis, numbers in zip("xyz", np.unravel_index(self.block, grid, order="F")):
            self.special |= {f"%ctaid.{axis}": numbers, f"%nctaid.{axis}": grid["xyz".index(axis)]}
        self.special |= {"%tid.y": 0, "%tid.z": 0, "%ntid.y": 1, "%ntid.z": 1}
        self.shared = np.full((self.block[-1] + 1, shared), 0xFF, np.uint8)
        self.copies = []  # asynchronous ones, not yet in a group: which threads', their places, values
        self.groups = []  # (which threads', copies)
        self.regions = []
        self.registers = {}
        self.arguments = {}
        scratch = [0] * (len(program.parameters) - len(arguments))  # of newer Tritons, none used
        assert len(scratch) in (0, 2), f"{len(arguments)} arguments for {program.parameters}"
        for (type, name), value in zip(program.parameters, [*arguments, *scratch]):
            self.arguments[name] = np.array([self._placed(value)]).astype(TYPES[type])

    def _placed(self, value):
        """The address of a tensor, else the number."""
        if not isinstance(value, torch.Tensor):
            return value
        last = -1
        if value.numel():
            last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride()))
        flat = value.detach().as_strided((last + 1,), (1,), value.storage_offset())
        start = len(self.regions) + 1 << REGION | value.data_ptr() % 256
        self.regions.append((start, flat.view(torch.uint8).numpy()))
        return start

    def run(self):
        # counters: of each lane, where these differ
        code = self.program.code
        at = 0
        counters = None
        everyone = np.ones(self.n, bool)
        while True:
            if counters is not None:
                at = counters.min()
                here = counters == at
                if here.all():
                    counters = None
            if at >= len(code):
                return
            predicate, opcode, operands = code[at]
            active = everyone if counters is None else here
            mask = active & self._predicate(predicate) if predicate else active
            if opcode[0] in ("bra", "ret"):
                target = self.program.labels[operands[0]] if opcode[0] == "bra" else len(code)
                if mask.all():
                    at = target
                    continue
                counters = np.full(self.n, at) if counters is None else counters
                counters[active] = np.where(mask[active], target, at + 1)
                continue
            if mask.any() and opcode[0] not in IGNORED:
                try:
                    self.step(opcode, operands, mask)
                except (Fault, KeyError, AttributeError) as error:
                    raise Fault(
                        f"{self.program.name}: {'.'.join(opcode)} {', '.join(operands)}: {error}"
                    ) from error
            if counters is None:
                at += 1
            else:
                counters[active] = at + 1

    def _predicate(self, name):
        value = self.read(name.lstrip("!"), "pred")
        return ~value if name[0] == "!" else value

    def read(self, operand, type):
        """An operand as an array of one or n values."""
        dtype = TYPES[type]
        if operand in self.registers:
            value = self.registers[operand]
            return value if value.dtype == dtype else value.astype(f"u{dtype.itemsize}").view(dtype)
        if operand in self.special:
            return np.asarray(self.special[operand], np.int64).reshape(-1).astype(dtype)
        if number := re.fullmatch(r"0([fd])([0-9A-Fa-f]+)", operand):
            return np.array([int(number[2], 16)], "u4" if number[1] == "f" else "u8").view(
                f"f{len(number[2]) // 2}"
            )
        if re.fullmatch(r"-?(0x)?[0-9A-Fa-f]+U?", operand):
            bits = int(operand.rstrip("U"), 0) & (1 << 8 * dtype.itemsize) - 1
            return np.array([bits], f"u{dtype.itemsize}").view(dtype)
        if operand.startswith("global_smem"):
            return np.zeros(1, dtype)
        if re.sub(r"\d+$", "", operand) in self.program.widths:
            # never written: anything, such as NaN
            return np.full(dtype.itemsize, 0xFF, np.uint8).view(dtype)
        raise Fault(f"unknown operand {operand}")

    def write(self, register, value, mask):
        if register == "_":
            return
        own = self.program.widths[
            register if register in self.program.widths else re.sub(r"\d+$", "", register)
        ]
        if own.kind != "b":
            if value.dtype.itemsize != own.itemsize:  # signed ones keep their sign
                value = value.astype(f"{'i' if value.dtype.kind == 'i' else 'u'}{own.itemsize}")
            value = np.ascontiguousarray(value).view(f"u{own.itemsize}")
        before = self.registers.get(register)
        if not mask.all():
            value = np.where(mask, value, np.zeros(1, value.dtype) if before is None else before)
        self.registers[register] = np.broadcast_to(value, self.n)

    def address(self, operand, mask):
        base, _, offset = operand.strip("[] ").partition("+")
        bits = "u64" if base.strip().startswith("%rd") else "u32"
        found = self.read(base.strip(), bits).astype(np.int64) + int(offset or "0", 0)
        return np.broadcast_to(found, self.n)[mask]

    def places(self, addresses, size, space, mask):
        """[(bytes, which of the addresses lie there, (addresses, size) their indices)] after all checks."""
        if (addresses % size).any():
            raise Fault(f"an address is not aligned to {size} bytes")
        if space == "shared":
            if (addresses < 0).any() or (addresses + size > self.shared.shape[1]).any():
                raise Fault(
                    f"an address outside of the {self.shared.shape[1]} bytes of shared memory"
                )
            whole = self.block[mask] * self.shared.shape[1] + addresses
            return [(self.shared.reshape(-1), slice(None), whole[:, None] + np.arange(size))]
        found = []
        for region in np.unique(addresses >> REGION):
            which = addresses >> REGION == region
            start, data = (
                self.regions[region - 1]
                if 0 < region <= len(self.regions)
                else (0, np.empty(0, np.uint8))
            )
            inside = addresses[which] - start
            if (inside < 0).any() or (inside + size > len(data)).any():
                raise Fault(
                    f"{((inside < 0) | (inside + size > len(data))).sum()} of {len(inside)} threads outside of "
                    f"tensor {region - 1}, which has {len(data)} bytes"
                )
            found.append((data, which, inside[:, None] + np.arange(size)))
        return found

    def load(self, addresses, dtype, space, mask):
        out = np.zeros((len(addresses), dtype.itemsize), np.uint8)
        for data, which, indices in self.places(addresses, dtype.itemsize, space, mask):
            out[which] = data[indices]
        return out.reshape(-1).view(dtype)

    def store(self, addresses, values, space, mask):
        parts = np.ascontiguousarray(values).view(np.uint8).reshape(len(addresses), -1)
        for data, which, indices in self.places(addresses, parts.shape[1], space, mask):
            data[indices] = parts[which]

    def step(self, op, args, mask):
        """One instruction that does not jump."""
        method = getattr(self, f"do_{op[0]}", None)
        if method:
            method(op, args, mask)
            return
        function = (ONE if len(args) == 2 else TWO)[op[0]]
        self.calculate(function, op, args, mask)

    def calculate(self, function, op, args, mask):
        """args[0] = function(the others)."""
        values = [self.read(arg, op[-1]) for arg in args[1:]]
        if op[-1] == "bf16":
            raise Fault("unknown instruction")
        self.write(args[0], function(*values), mask)

    def do_ld(self, op, args, mask):
        if "param" in op:
            name = args[1].strip("[] ").partition("+")[0].strip()
            return self.write(
                args[0].strip("<> "), np.broadcast_to(self.arguments[name], self.n), mask
            )
        type = TYPES[op[-1]]
        for register, addresses, space in self.vector(op, args[0], args[1], mask):
            out = np.zeros(self.n, type)
            out[mask] = self.load(addresses, type, space, mask)
            self.write(register, out, mask)

    def do_st(self, op, args, mask):
        for register, addresses, space in self.vector(op, args[1], args[0], mask):
            self.store(
                addresses, np.broadcast_to(self.read(register, op[-1]), self.n)[mask], space, mask
            )

    def vector(self, op, registers, place, mask):
        """Each register of <a, b, ...> with its addresses and what kind of memory they are in."""
        names = parts(registers)
        size = TYPES[op[-1]].itemsize
        addresses = self.address(place, mask)
        if (addresses % (size * len(names))).any():
            raise Fault(f"an address is not aligned to {size * len(names)} bytes")
        space = "shared" if any(word.startswith("shared") for word in op) else "global"
        return [(name, addresses + i * size, space) for i, name in enumerate(names)]

    def do_cp(self, op, args, mask):
        """Asynchronous copies: each thread waits for all groups of its own but the last few."""
        if op[2] == "commit_group":
            self.groups.append((mask, self.copies))
            self.copies = []
        elif op[2] == "wait_group":
            later = np.zeros(self.n, np.int64)
            for committed, copies in reversed(self.groups):
                self.arrive(copies, mask & committed & (later >= int(args[0], 0)))
                later += committed
        else:
            dtype = np.dtype(f"V{int(args[2], 0)}")
            wanted = mask & (self.read(args[3], "u32") > 0) if len(args) > 3 else mask
            values = np.zeros(self.n, dtype)
            values[wanted] = self.load(self.address(args[1], wanted), dtype, "global", wanted)
            places = np.zeros(self.n, np.int64)
            places[mask] = self.address(args[0], mask)
            nothing_yet = np.full((int(mask.sum()), dtype.itemsize), 0xFF, np.uint8)
            self.store(places[mask], nothing_yet, "shared", mask)
            self.copies.append((mask.copy(), places, values))

    def arrive(self, copies, done):
        for under_way, places, values in copies:
            lanes = under_way & done
            if lanes.any():
                self.store(places[lanes], values[lanes], "shared", lanes)
            under_way &= ~done

    def do_mov(self, op, args, mask):
        whole = TYPES[op[-1]]
        names = parts(args[1] if args[1].startswith("<") else args[0])
        kind = f"b{8 * whole.itemsize // len(names)}" if len(names) > 1 else op[-1]
        if args[1].startswith("<"):
            values = np.stack([np.broadcast_to(self.read(name, kind), self.n) for name in names], 1)
            self.write(args[0], np.ascontiguousarray(values).view(whole)[:, 0], mask)
        else:
            value = np.array(np.broadcast_to(self.read(args[1], op[-1]), self.n))
            for i, name in enumerate(names):
                self.write(name, value.view(TYPES[kind]).reshape(self.n, -1)[:, i], mask)

    do_cvta = do_mov

    def do_cvt(self, op, args, mask):
        to, source = op[-2:]
        if to == "bf16x2":  # the second value is the lower half
            upper, lower = (to_bf16(self.read(arg, source)).astype(np.uint32) for arg in args[1:])
            self.write(args[0], upper << 16 | lower, mask)
            return
        value = self.read(args[1], source)
        if source == "bf16":
            value = from_bf16(value)
            source = "f32"
        if to == "bf16":
            value = to_bf16(np.ascontiguousarray(value, np.float32))
        elif "rzi" in op:
            value = np.trunc(value)
        elif op[1] not in ("rn", to):
            raise Fault("unknown instruction")
        self.write(args[0], value.astype(TYPES[to]), mask)

    def do_selp(self, op, args, mask):
        true, false = (self.read(arg, op[-1]) for arg in args[1:3])
        self.write(args[0], np.where(self.read(args[3], "pred"), true, false), mask)

    def do_setp(self, op, args, mask):
        x, y = (self.read(arg, op[-1]) for arg in args[1:3])
        if len(op) > 3 or (op[1] == "ne" and op[-1][0] == "f"):  # whose NaN is not numpy's
            raise Fault("unknown instruction")
        self.write(args[0], COMPARE[op[1]](x, y), mask)

    def do_fma(self, op, args, mask):  # rounded once, but for the sum in float64
        self.calculate(
            lambda x, y, z: (x.astype(np.float64) * y + z).astype(x.dtype), op, args, mask
        )

    def do_mul(self, op, args, mask):
        type = op[-1]
        if type[0] == "f":
            return self.calculate(np.multiply, op, args, mask)
        x, y = (self.read(arg, type) for arg in args[1:3])
        wide = (
            np.dtype(f"{x.dtype.kind}{2 * x.dtype.itemsize}")
            if x.dtype.itemsize < 8
            else np.dtype(object)
        )
        out = x.astype(wide) * y.astype(wide)
        if "hi" in op:
            out = (out >> 8 * x.dtype.itemsize).astype(x.dtype)
        elif "wide" not in op:
            out = x * y
        if op[0] == "mad":
            out = out + self.read(args[3], f"{type[0]}{8 * out.dtype.itemsize}")
        self.write(args[0], out, mask)

    do_mad = do_mul

    def do_min(self, op, args, mask):
        if "NaN" in op:
            raise Fault("unknown instruction")
        self.calculate({"min": np.fmin, "max": np.fmax}[op[0]], op, args, mask)

    do_max = do_min

    def do_shl(self, op, args, mask):
        x = self.read(args[1], op[-1])
        bits = 8 * x.dtype.itemsize
        count = self.read(args[2], "u32")
        shift = np.left_shift if op[0] == "shl" else np.right_shift
        out = shift(x, np.minimum(count, bits - 1).astype(x.dtype))
        if op[0] == "shl" or x.dtype.kind == "u":
            out = np.where(count >= bits, x.dtype.type(0), out)
        self.write(args[0], out, mask)

    do_shr = do_shl

    def do_bfe(self, op, args, mask):
        x, start, length = (
            self.read(args[1], op[-1]),
            *(self.read(arg, "u32").astype(np.int64) for arg in args[2:]),
        )
        bits = 8 * x.dtype.itemsize
        up = np.clip(bits - start - length, 0, bits - 1).astype(x.dtype)
        self.write(args[0], (x << up) >> np.clip(bits - length, 0, bits - 1).astype(x.dtype), mask)

    def do_shfl(self, op, args, mask):
        value, by, clamp = (np.broadcast_to(self.read(arg, "u32"), self.n) for arg in args[1:4])
        by = by.astype(np.int64)
        lane = self.lane
        segment = clamp.astype(np.int64) >> 8 & 31
        last = lane & segment | clamp.astype(np.int64) & 31 & ~segment
        source = {
            "up": lane - by,
            "down": lane + by,
            "bfly": lane ^ by,
            "idx": lane & segment | by & ~segment,
        }[op[2]]
        source = np.where(source >= last if op[2] == "up" else source <= last, source, lane)
        self.write(args[0].partition("|")[0], value[np.arange(self.n) - lane + source], mask)

    def do_ldmatrix(self, op, args, mask):
        """Row i of a warp's matrix m is where lane 8 m + i says."""
        registers = parts(args[0])
        lanes = self.matrix_lanes(op, registers, mask)
        rows = np.zeros(self.n, "V16")
        rows[lanes] = self.load(self.address(args[1], lanes), rows.dtype, "shared", lanes)
        matrices = rows.view(np.uint16).reshape(-1, 4, 8, 8)
        for i, register in enumerate(registers):
            matrix = matrices[:, i].swapaxes(1, 2) if "trans" in op else matrices[:, i]
            self.write(register, np.ascontiguousarray(matrix).reshape(-1).view(np.uint32), mask)

    def do_stmatrix(self, op, args, mask):
        registers = parts(args[1])
        lanes = self.matrix_lanes(op, registers, mask)
        matrices = np.zeros((self.n // 32, 4, 8, 8), np.uint16)
        for i, register in enumerate(registers):
            held = np.array(np.broadcast_to(self.read(register, "u32"), self.n))
            matrix = held.view(np.uint16).reshape(-1, 8, 8)
            matrices[:, i] = matrix.swapaxes(1, 2) if "trans" in op else matrix
        rows = matrices.reshape(-1, 8).view("V16")[:, 0]
        self.store(self.address(args[0], lanes), rows[lanes], "shared", lanes)

    def matrix_lanes(self, op, registers, mask):
        self.need_warps(mask)
        if op[-1] != "b16":
            raise Fault("unknown instruction")
        return mask & (self.lane < 8 * len(registers))

    def need_warps(self, mask):
        if not np.isin(mask.reshape(-1, 32).sum(1), (0, 32)).all():
            raise Fault("only a part of a warp")

    def do_mma(self, op, args, mask):
        """m16n8k16 of bf16 in fp32."""
        if op[3] != "m16n8k16" or op[-2] != "bf16":
            raise Fault("unknown instruction")
        self.need_warps(mask)
        d, a, b, c = map(parts, args)
        group = np.arange(32) // 4
        inner = np.arange(32) % 4
        right = np.zeros((self.n // 32, 16, 8))
        for half in range(2):
            for j, name in enumerate(b):
                right[:, 2 * inner + half + 8 * j, group] = self.bf16_half(name, half)
        product = self.rows_of_warps(a) @ right
        for j, (register, added) in enumerate(zip(d, c)):
            part = product[:, group + 8 * (j // 2), 2 * inner + j % 2].reshape(-1)
            self.write(register, (part + self.read(added, "f32")).astype(np.float32), mask)

    def rows_of_warps(self, registers):
        """(warps, 16, 16): the first factor of a product, where each warp holds 16 rows in registers."""
        group = np.arange(32) // 4
        inner = np.arange(32) % 4
        rows = np.zeros((self.n // 32, 16, 16))
        for half in range(2):
            for j, name in enumerate(registers):
                column = 2 * inner + half + 8 * (j // 2)
                rows[:, group + 8 * (j % 2), column] = self.bf16_half(name, half)
        return rows

    def do_wgmma(self, op, args, mask):
        """m64nNk16 of bf16 in fp32; the second factor is in shared memory, the first there or in registers. What is started
        is done at once."""
        if op[1] != "mma_async":
            return
        shape = re.fullmatch(r"m64n(\d+)k16", op[4])
        if not shape or op[5:] != ["f32", "bf16", "bf16"] or not mask.all():
            raise Fault("unknown instruction")
        columns = int(shape[1])
        if args[1].startswith("<"):
            left = self.rows_of_warps(parts(args[1])).reshape(-1, 64, 16)
        else:
            left = self.factor(args[1], 64, args[6])
        right = self.factor(args[2], columns, args[-1])
        product = (left @ right.swapaxes(1, 2)) * int(args[4]) * int(args[5])
        keeps = self.read(args[3], "pred" if args[3].startswith("%") else "u32") != 0
        warp, lane = np.divmod(np.arange(128), 32)
        for i, register in enumerate(parts(args[0])):
            row = 16 * warp + lane // 4 + 8 * (i // 2 % 2)
            column = 8 * (i // 4) + 2 * (lane % 4) + i % 2
            before = np.where(keeps, self.read(register, "f32").astype(np.float64), 0)
            self.write(register, (product[:, row, column].reshape(-1) + before).astype("f4"), mask)

    def factor(self, descriptor, rows, rows_first):
        """(warpgroups, rows, 16) float64: a factor of wgmma by its descriptor, in lines of 32, 64 or 128 bytes, whose
        units of 16 bytes are swizzled. rows_first: 1 where neighbours in a line are of different rows."""
        words = np.broadcast_to(self.read(descriptor, "u64"), self.n).astype(np.int64)
        words = words.reshape(-1, 128)
        if (words != words[:, :1]).any():
            raise Fault("a descriptor differs between threads")
        word = words[:, :1, None]
        start, leading, stride = ((word >> shift & 0x3FFF) << 4 for shift in (0, 16, 32))
        lines = 128 >> (word >> 62 & 3) - 1  # bytes
        if (word >> 62 & 3 == 0).any() or (word >> 49 & 7).any():
            raise Fault("unknown layout")
        row, k = np.arange(rows)[:, None], np.arange(16)
        if rows_first == "1":
            along = row * 2
            place = along % lines + along // lines * leading + k % 8 * lines + k // 8 * stride
        else:
            place = k * 2 + row % 8 * lines + row // 8 * stride
        place = place + start
        place ^= (place >> 7 & lines // 16 - 1) << 4
        if (place < 0).any() or (place + 2 > self.shared.shape[1]).any():
            raise Fault(f"a factor outside of the {self.shared.shape[1]} bytes of shared memory")
        place += self.block[::128, None, None] * self.shared.shape[1]
        return from_bf16(self.shared.reshape(-1).view(np.uint16)[place // 2]).astype(np.float64)

    def bf16_half(self, name, half):
        """(warps, 32): the lower or upper bf16 of a register."""
        bits = np.broadcast_to(self.read(name, "b32"), self.n)
        return from_bf16(halves(bits)[:, half]).reshape(-1, 32)
