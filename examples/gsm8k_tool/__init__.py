"""Grade-school math (GSM8K) with a tool that checks answers: verl's recipe gsm8k_tool_agent."""
