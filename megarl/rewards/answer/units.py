"""Names of units in English and Chinese, and words after a number that do not change it."""

from __future__ import annotations

import re

_NAMES: dict[str, str] = {
    "m": "m meter meters metre metres 米",
    "cm": "cm centimeter centimeters centimetre centimetres 厘米 公分",
    "mm": "mm millimeter millimeters millimetre millimetres 毫米",
    "dm": "dm decimeter decimeters decimetre decimetres 分米",
    "km": "km kilometer kilometers kilometre kilometres 千米 公里",
    "nm": "nm nanometer nanometers 纳米",
    "um": "μm um micrometer micrometers 微米",
    "in": "inch inches in",
    "ft": "ft foot feet 英尺",
    "yd": "yd yard yards",
    "mi": "mi mile miles 英里",
    "g": "g gram grams 克",
    "kg": "kg kilogram kilograms kilo kilos 千克 公斤",
    "mg": "mg milligram milligrams 毫克",
    "t": "ton tons tonne tonnes 吨",
    "jin": "斤",
    "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces",
    "l": "L l liter liters litre litres 升",
    "ml": "mL ml milliliter milliliters millilitre millilitres 毫升",
    "gal": "gallon gallons gal",
    "ms": "ms millisecond milliseconds 毫秒",
    "s": "s sec secs second seconds 秒 秒钟",
    "min": "min mins minute minutes 分钟 分",
    "h": "h hr hrs hour hours 小时 时",
    "day": "day days 天 日",
    "week": "week weeks 周 星期",
    "month": "month months 月 个月",
    "year": "year years yr yrs 年 岁",
    "$": "$ US$ USD dollar dollars 美元",
    "¥": "¥ RMB CNY yuan 元 块 块钱 圆 人民币",
    "€": "€ EUR euro euros 欧元",
    "£": "£ GBP 英镑",
    "₹": "₹ INR rupee rupees Rs",
    "cent": "cent cents ¢ 美分",
    "jiao": "角",
    "deg": "degree degrees deg 度",
    "degC": "degreesC degreeC celsius degreescelsius 摄氏度",
    "degF": "degreesF degreeF fahrenheit degreesfahrenheit 华氏度",
    "rad": "rad radian radians 弧度",
    "N": "N newton newtons 牛 牛顿",
    "kN": "kN 千牛",
    "J": "J joule joules 焦 焦耳",
    "kJ": "kJ kilojoule kilojoules 千焦",
    "W": "W watt watts 瓦 瓦特",
    "kW": "kW kilowatt kilowatts 千瓦",
    "MW": "MW megawatt megawatts 兆瓦",
    "V": "V volt volts 伏 伏特",
    "mV": "mV millivolt millivolts 毫伏",
    "kV": "kV kilovolt kilovolts 千伏",
    "A": "amp amps ampere amperes 安 安培",
    "mA": "mA milliamp milliamps milliampere milliamperes 毫安",
    "ohm": "Ω ohm ohms 欧 欧姆 \\Omega",
    "kohm": "kΩ 千欧",
    "Hz": "Hz hertz 赫兹 赫",
    "kHz": "kHz kilohertz 千赫",
    "MHz": "MHz megahertz 兆赫",
    "Pa": "Pa pascal pascals 帕",
    "kPa": "kPa 千帕",
    "MPa": "MPa 兆帕",
    "K": "K kelvin 开尔文",
    "mol": "mol mole moles 摩尔",
    "mmol": "mmol millimole millimoles 毫摩尔",
    "mi/h": "mph",
    "km/h": "kph kmh",
    "ha": "hectare hectares ha 公顷",
    "acre": "acre acres",
    "mu": "亩",
    "am": "am a.m. a.m 上午",
    "pm": "pm p.m. p.m 下午",
    "cm^3": "cc ccm",
    "unit": "",
}
_SYMBOL = {name: symbol for symbol, names in _NAMES.items() for name in names.split()}


def names() -> dict[str, str]:
    """Return name -> symbol for every unit."""
    return dict(_SYMBOL)


_SQUARE = {"平方": "^2", "立方": "^3", "square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_IGNORED = {"unit", "units", "单位", "每", "的", "of"}
_NUMERALS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen"""
NUMERALS = _NUMERALS.split()

_STOPPING = (
    "or and not no nor but if is are was than then less more least most fewer at over under about above below between "
    "within except plus minus times half quarter third double dozen dozens hundred thousand million billion trillion "
    "to from maybe either both possibly tenths hundredths thousandths thirds fourths fifths sixths eighths halves "
    "quarters pairs pair score scores k some any greater smaller only otherwise unless when where while for to until "
    "pi squared cubed sqrt root e i alternatively alternately instead rather else versus vs actually correction wait "
    "twenty thirty forty fifty sixty seventy eighty ninety thousands millions billions trillions hundreds factorial "
    "factorials mod modulo doubled halved tripled negated approx approximately roughly ish ths th fold bis upward "
    "upwards too"
)
_STOP = frozenset(_STOPPING.split() + NUMERALS)
_CHINESE_STOP = re.compile(
    r"或|和|与|不|非|以上|以下|以内|左右|多|少|大于|小于|至|到|几|分之|倍的|百|千|万|亿|半|成|否|错|对|吗|呢|^的.|^余"
    r"|折$|^[加减乘]|^打$|^来个|倒数|相反数|倍数|两倍|次方|阶乘|之外|除外"
)
_LAST_STOP = re.compile(
    r"\b(?:wrong|false|incorrect|remainders?|reciprocal|inverse|negative|choose|power)\W*$", re.IGNORECASE
)
"""Judgements and operations at the end; ``5 wrong answers`` counts answers."""
_WORD = re.compile(r"\\?[A-Za-zΩ$€£¥₹¢]+(?:\.[a-z]\.?)?|[一-鿿]+")


def stops(word: str) -> bool:
    """Return True if a word after a number changes it or joins it to something else: it is neither unit nor noun."""
    return word.lower() in _STOP


def opens(word: str) -> bool:
    """Return True for ``square`` and ``cubic``, which must precede a unit."""
    return word in _SQUARE


def unit_of(text: str) -> str | None:
    """Return the symbol of the unit after a number: ``cm``, ``m/s``, ``cm^2``, ``_8`` for a base.

    '' if harmless nouns ("5 apples", "5个") or nothing follow; None if other text follows: "5 or 6", "5x", "5 times as
    many".
    """
    if not text.strip():
        return ""
    if base := re.fullmatch(r"\s*_\s*\{?\s*(\d{1,2}|[a-z]+)\s*\}?\s*", text):
        name = base.group(1)
        return f"_{NUMERALS.index(name)}" if name in NUMERALS else f"_{name}" if name.isdigit() else None
    if len(text) > 60 or not _separate(text) or _LAST_STOP.search(text):
        return None
    symbols: list[str] = []
    power, over, unknown = "", False, 0
    text = re.sub(r"(?<=[cdkm]m)(?=[23]\b)|(?<=\sm)(?=[23]\b)", "^", text)
    for piece in re.findall(
        r"\^\s*\{?\s*-?\d\s*\}?|/|\bper\b|\\cdot|[一-鿿]+|\\?[A-Za-zΩ$€£¥₹¢]+(?:\.[a-z]\.?)?|\S", text
    ):
        exponent = re.fullmatch(r"\^\s*\{?\s*(-?\d)\s*\}?", piece)
        if exponent and symbols:
            symbols[-1] += f"^{exponent.group(1)}"
        elif piece in ("/", "per", "每"):
            if over or not (symbols or unknown):
                return None
            over = True
            symbols.append("/")
        elif piece in _SQUARE:
            power = _SQUARE[piece]
        elif (symbol := _symbol(piece)) is not None:
            if symbol in ("degC", "degF") and symbols[-1:] == ["deg"]:
                symbols.pop()
            symbols += [symbol + power] if symbol else []
            power = ""
        elif stops(piece) or _CHINESE_STOP.search(piece):
            return None
        elif piece in (r"\cdot", "(", ")", "."):
            continue
        elif (
            _WORD.fullmatch(piece)
            and len(piece) > (0 if piece[0] >= "一" else 2)
            and not piece.startswith("\\")
            and not symbols
        ):
            unknown += 1
        elif piece in ("C", "F") and symbols[-1:] == ["deg"]:
            symbols[-1] = f"deg{piece}"
        elif not (symbols and _WORD.fullmatch(piece) and len(piece) > 2 and not piece.startswith("\\")):
            return None
    if unknown > 4 or (over and unknown and not symbols) or piece in _SQUARE:  # "12 square" may be a power
        return None
    return "".join(symbols).strip("/") if symbols else ""


def _separate(text: str) -> bool:
    """Return False for a single Latin letter right after the number: it is a variable, not a unit."""
    return not re.match(r"[A-Za-z](?![A-Za-z])", text)


def _symbol(piece: str) -> str | None:
    if piece in _IGNORED:
        return ""
    for prefix, power in (("平方", "^2"), ("立方", "^3")):
        if piece.startswith(prefix) and piece[2:] in _SYMBOL:
            return _SYMBOL[piece[2:]] + power
    if match := re.fullmatch(r"([一-鿿]+)(?:每|/)([一-鿿]+)", piece):
        top, bottom = _SYMBOL.get(match.group(1)), _SYMBOL.get(match.group(2))
        return f"{top}/{bottom}" if top and bottom else None
    if piece in _SYMBOL:
        return _SYMBOL[piece]
    return _SYMBOL.get(piece.lower()) if len(piece) > 2 else None
