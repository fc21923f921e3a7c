//! What the compiler says where a handler is wrong: each message names the fix.

#[test]
fn mistakes_are_told_where_they_are_with_what_to_do() {
    trybuild::TestCases::new().compile_fail("tests/ui/*.rs");
}
