//! Tests of tierline's macros that need tierline itself.
//!
//! A crate of macros is compiled for the compiler's own use, with different features and another profile than
//! programs, and so is all that its tests depend on: in `macros`, tierline and its client of the broker
//! would be compiled once more.

#[doc = include_str!("../../macros/src/task.md")]
mod task {}

#[doc = include_str!("../../macros/src/task_payload.md")]
mod task_payload {}

#[cfg(test)]
mod tests {
    use serde::{Deserialize, Serialize};
    use tierline::{Context, Registry, TaskError};

    macro_rules! handler {
        ($name:literal, $function:ident, $payload:ident) => {
            #[derive(Serialize, Deserialize)]
            struct $payload {}

            #[tierline::task(name = $name)]
            async fn $function(_: $payload, _: Context) -> Result<(), TaskError> {
                Ok(())
            }
        };
    }

    handler!("report.export", export, Export);

    #[test]
    fn a_handler_may_come_from_another_macro() {
        let registry = Registry::collected().unwrap();
        assert!(registry.get("report.export").is_some());
    }
}
