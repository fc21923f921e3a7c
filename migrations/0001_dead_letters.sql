CREATE TABLE tierline.dead_letters (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY
);
