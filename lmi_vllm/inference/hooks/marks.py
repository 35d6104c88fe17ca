"""The attributes by which a decorated function is known; upstream's names."""

from typing import Final

INPUT_FORMATTER: Final = "is_input_formatter"
OUTPUT_FORMATTER: Final = "is_output_formatter"
PREDICTION_HANDLER: Final = "is_prediction_handler"
INIT_HANDLER: Final = "is_init_handler"
