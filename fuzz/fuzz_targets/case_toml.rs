#![no_main]
tqcheck_fuzz::target!(tqcheck::fuzzing::CASE_TOML);
