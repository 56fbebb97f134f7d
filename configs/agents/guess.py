"""The game of `experiment=guess`, played by an agent: a loop against the openai package that knows nothing of megarl.

    megarl train experiment=guess rollout.workflow=agent rollout.agent=configs/agents/guess.py \
        rollout.agent_rewards=true
"""

import re

import openai

client = openai.AsyncOpenAI(base_url="http://127.0.0.1", api_key="none", timeout=3600.0)


async def run(base_url, prompt, request_kwargs, metadata):
    """Play one game; the score is 1 where the number was found."""
    model = client.with_options(base_url=base_url)
    number, messages = int(metadata["ground_truth"]), list(prompt)
    for _ in range(metadata["extra_info"]["tries"]):
        response = await model.chat.completions.create(messages=messages, **request_kwargs)
        choice = response.choices[0]
        guesses = re.findall(r"-?\d+", choice.message.content)
        if not guesses or int(guesses[-1]) == number or choice.finish_reason != "stop":
            return float(bool(guesses) and int(guesses[-1]) == number)
        reply = "higher" if int(guesses[-1]) < number else "lower"
        messages += [choice.message, {"role": "user", "content": reply}]
    return 0.0
