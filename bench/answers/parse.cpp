// Parses answers as llama-server does, without a model: a line of JSON in, a line of JSON out.
//
// A request has a chat template, the messages and tools of a chat, and texts: the answer to it up to
// some places, and at last the whole answer. Without the first three it has those of the request
// before. The reply has the prompt and a message for each text.

#include "chat.h"
#include "json.h"

#include <iostream>

static common_json failed(const std::exception & error) {
    common_json found = common_json::object();
    found["error"]    = std::string(error.what());
    return found;
}

struct chat {
    std::string               prompt;
    common_chat_parser_params params;
};

// Analyses the template, which takes longer than parsing.
static chat chat_of(const common_json & request) {
    auto templates = common_chat_templates_init(nullptr, request.at("template").get<std::string>(), "<s>", "</s>");
    common_chat_templates_inputs inputs;
    inputs.messages            = common_chat_msgs_parse_oaicompat(request.at("messages"));
    inputs.tools               = common_chat_tools_parse_oaicompat(request.at("tools"));
    inputs.parallel_tool_calls = true;
    inputs.reasoning_format    = COMMON_REASONING_FORMAT_AUTO;
    const auto applied = common_chat_templates_apply(templates.get(), inputs);

    chat found{ applied.prompt, common_chat_parser_params(applied) };
    found.params.reasoning_format = inputs.reasoning_format;
    found.params.parser.load(applied.parser);
    return found;
}

static common_json reply_to(const chat & chat, const common_json & texts) {
    common_json messages = common_json::array();
    for (size_t i = 0; i < texts.size(); i++) {
        const bool partial = i + 1 < texts.size();
        try {
            const auto text = texts.at(i).get<std::string>();
            messages.push_back(common_chat_parse(text, partial, chat.params).to_json_oaicompat());
        } catch (const std::exception & error) {
            messages.push_back(failed(error));
        }
    }
    common_json found = common_json::object();
    found["prompt"]   = chat.prompt;
    found["messages"] = messages;
    return found;
}

int main() {
    std::string line;
    chat        last;
    while (std::getline(std::cin, line)) {
        common_json reply;
        try {
            const auto request = common_json::parse(line);
            if (request.contains("template")) {
                last = chat_of(request);
            }
            reply = reply_to(last, request.at("texts"));
        } catch (const std::exception & error) {
            reply = failed(error);
        }
        std::cout << reply.dump() << std::endl;
    }
}
