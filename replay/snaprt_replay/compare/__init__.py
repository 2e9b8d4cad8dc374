"""Compare arrays with what was recorded, and judge the differences."""
