"""Texts whose characters straddle tokens, or whose visible signs are several characters."""

HARD_TEXTS = {
    "chinese": "客单价上升了三成。",
    "family": "a 👨‍👩‍👧‍👦 b 👩🏽‍🚀 c",
    "flags": "🇩🇪🇫🇷🏴󠁧󠁢󠁳󠁣󠁴󠁿!",
    "thai": "สวัสดีครับ ผมชื่อน้ำ",
    "hangul": "안녕하세요 한글 걈깞",
    "arabic": "السَّلامُ عَلَيْكُمْ",
    "hindi": "नमस्ते दुनिया",
    "rare": "𠜎𠜱 𒀀 🜁 ∮ E⋅da",
    "mixed": " leading, naïve Zürich\r\n\tté\n",
    "replacement": "a � b ��",
}
