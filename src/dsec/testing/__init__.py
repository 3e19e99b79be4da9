"""Published test tools: leak detector, fault injection, a clock that tests own, agents on plain sockets."""
